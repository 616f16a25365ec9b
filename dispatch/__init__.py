"""Which family serves a shape, and why: ledger, device profiles, classifier, rules, router, optimize(). No torch."""

from rooflane.dispatch.adapters.known import GPT2_BLOCK
from rooflane.dispatch.adapters.mapping import BlockMapping, OptimizeError, WeightsAt, weights_at
from rooflane.dispatch.classify import BORDERLINE_MARGIN, REGIMES, Classification, classify, op_time
from rooflane.dispatch.device import (
    device_profile,
    host_profile,
    keep_profile,
    kept_path,
    load_profile,
    match_profile,
    profile_names,
)
from rooflane.dispatch.ledger import Ledger, Op, ledger, peak_bytes, weight_bytes
from rooflane.dispatch.lint import lint
from rooflane.dispatch.optimize import optimize, restore, served
from rooflane.dispatch.profile import Figure, Profile, ProfileError
from rooflane.dispatch.route import Rejection, Route, RouteError, refusal, route
from rooflane.dispatch.rule_files import load_rules, parse_rules
from rooflane.dispatch.rules import FIELDS, LintFinding, Rule, RuleError, RuleTable, show_condition

__all__ = [
    "BORDERLINE_MARGIN",
    "FIELDS",
    "GPT2_BLOCK",
    "REGIMES",
    "BlockMapping",
    "Classification",
    "Figure",
    "Ledger",
    "LintFinding",
    "Op",
    "OptimizeError",
    "Profile",
    "ProfileError",
    "Rejection",
    "Route",
    "RouteError",
    "Rule",
    "RuleError",
    "RuleTable",
    "WeightsAt",
    "classify",
    "device_profile",
    "host_profile",
    "keep_profile",
    "kept_path",
    "ledger",
    "lint",
    "load_profile",
    "load_rules",
    "match_profile",
    "op_time",
    "optimize",
    "parse_rules",
    "peak_bytes",
    "profile_names",
    "refusal",
    "restore",
    "route",
    "served",
    "show_condition",
    "weight_bytes",
    "weights_at",
]
