"""The router: from a shape and a device to the family that serves it, with the reason for every choice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rooflane.dispatch.classify import Classification, classify
from rooflane.dispatch.profile import Profile
from rooflane.dispatch.rules import Rule, RuleTable, facts
from rooflane.dispatch.units import duration, size
from rooflane.families import FamilySpec, registry
from rooflane.shapes import PUBLISHED, Form, Shape


class RouteError(ValueError):
    """No rule's family can serve the shape; the text holds every rule's reason."""


@dataclass(frozen=True)
class Rejection:
    """A rule or a family that was not chosen, with its one-line reason."""

    kind: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.reason}"


@dataclass(frozen=True)
class Route:
    """The rule that won, the family and options it names, and what was rejected on the way.

    `predicted_s` is the family's own prediction of one call; `peak_bytes` the bytes it needs alive. `rejected` holds
    every earlier rule and every other family.
    """

    shape: Shape
    profile: str
    rule: Rule
    family: str
    options: dict[str, Any]
    classification: Classification
    predicted_s: float
    peak_bytes: int
    rejected: tuple[Rejection, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the route as plain values, for JSON."""
        return {
            "shape": self.shape.as_dict(),
            "profile": self.profile,
            "rule": self.rule.name,
            "because": self.rule.because,
            "family": self.family,
            "options": self.options,
            "predicted_s": self.predicted_s,
            "peak_bytes": self.peak_bytes,
            "classification": self.classification.as_dict(),
            "rejected": [asdict(rejection) for rejection in self.rejected],
        }

    def explain(self) -> str:
        """Return the choice and every rejection in readable lines."""
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        lines = [
            self.classification.explain(),
            f"  rule      {self.rule.name}: {self.rule.because}",
            f"  family    {self.family}{options}: {_cost(self.predicted_s, self.peak_bytes)}",
        ]
        lines += [f"  rejected  {rejection}" for rejection in self.rejected]
        return "\n".join(lines)


def route(
    shape: Shape, profile: Profile, rules: RuleTable, form: Form = PUBLISHED, *, may_compile: bool = True
) -> Route:
    """Return the first rule that matches the shape and whose family can build it on the device.

    A matching rule is passed over when its family does not support the shape, does not compute the layers' form, needs
    more memory than the device has, or runs torch.compile although `may_compile` is False. Raises `RouteError` with
    every reason when no rule can serve.
    """
    classification = classify(shape, profile)
    families = registry.load_families()
    known = facts(shape, profile, classification)
    rejected: list[Rejection] = []
    for rule in rules.rules:
        reason = rule.mismatch(known)
        if reason is None:
            spec = families[rule.family]
            reason = refusal(spec, shape, profile, rule.options, form, may_compile)
            if reason is None:
                others = [other for name, other in families.items() if name != rule.family]
                rejected += [_passed_over(other, shape, profile, rule, form, may_compile) for other in others]
                return Route(
                    shape=shape,
                    profile=profile.name,
                    rule=rule,
                    family=rule.family,
                    options=dict(rule.options),
                    classification=classification,
                    predicted_s=spec.predict_s(shape, profile),
                    peak_bytes=spec.peak_bytes(shape, profile, **rule.options),
                    rejected=tuple(rejected),
                )
            reason = f"matches, but its family {rule.family} cannot serve: {reason}"
        rejected.append(Rejection("rule", rule.name, reason))
    reasons = "; ".join(map(str, rejected))
    raise RouteError(
        f"shape {shape.id} ({shape.label()}) finds no family on {profile.name}: {reasons}. Add a rule to {rules.path} "
        "whose family takes it, or run it on a larger device"
    )


def refusal(
    spec: FamilySpec, shape: Shape, profile: Profile, options: dict[str, Any], form: Form = PUBLISHED,
    may_compile: bool = True,
) -> str | None:  # fmt: skip
    """Return why the family cannot build the shape on the device, or None when it can."""
    if not may_compile and spec.compiles:
        return "it runs torch.compile, which takes seconds for each new shape; rules of your own may name it"
    reason = spec.refuse_form(form) or spec.supports(shape, profile)
    if reason is not None:
        return reason
    needed = spec.peak_bytes(shape, profile, **options)
    if needed > profile.memory_bytes:
        return f"needs {size(needed)}, {profile.name} has {size(profile.memory_bytes)}"
    return None


def _passed_over(
    spec: FamilySpec, shape: Shape, profile: Profile, rule: Rule, form: Form, may_compile: bool
) -> Rejection:
    reason = refusal(spec, shape, profile, {}, form, may_compile)
    if reason is None:
        cost = _cost(spec.predict_s(shape, profile), spec.peak_bytes(shape, profile))
        reason = f"could serve ({cost}), but the rule {rule.name} matched first"
    return Rejection("family", spec.name, reason)


def _cost(seconds: float, count: int) -> str:
    return f"{duration(seconds)} and {size(count)} predicted"
