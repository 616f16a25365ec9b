"use strict";

// Sorting: each header becomes a button, so Enter and Space work as a click does.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const compare = "numeric" in head.dataset ? byKey : byText;
      const rows = [...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], descending ? -1 : 1));
      body.append(...rows);
    });
  });
}

// Cells without a figure stay last in both directions.
function byKey(a, b, direction) {
  if (!("key" in a.dataset) || !("key" in b.dataset)) return ("key" in b.dataset) - ("key" in a.dataset);
  return direction * (Number(a.dataset.key) - Number(b.dataset.key));
}

function byText(a, b, direction) {
  return direction * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
}

// Price: dollars an hour over tokens an hour.
const price = document.getElementById("price-hour");
if (price) {
  document.getElementById("price-control").hidden = false;
  price.addEventListener("input", () => {
    const hourly = price.valueAsNumber;
    for (const cell of document.querySelectorAll("td[data-tokens]")) {
      const value = (hourly * 1e9) / (3600 * Number(cell.dataset.tokens));
      const known = hourly > 0 && Number.isFinite(value);
      cell.textContent = known ? short(value) : "-";
      if (known) cell.dataset.key = value;
      else delete cell.dataset.key;
    }
  });
}

function short(value) {
  if (value >= 1e6) return value.toExponential(2);
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}

// A table wider than its place says so.
const marked = () => {
  for (const place of document.querySelectorAll(".scroll")) {
    place.classList.toggle("more", place.scrollWidth > place.clientWidth);
  }
};
addEventListener("resize", marked);
addEventListener("toggle", marked, true);
marked();
