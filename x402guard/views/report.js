"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const printer = byId("print");
  printer.hidden = false;
  printer.addEventListener("click", () => print());
  const find = byId("find");
  if (!find) return;
  const kind = byId("kind"), evidence = byId("evidence"), shown = byId("shown");
  const rows = [...document.querySelectorAll("[data-k]")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const sift = () => {
    const text = find.value.trim().toLowerCase();
    let count = 0;
    rows.forEach((row, number) => {
      const fits = (!kind.value || row.dataset.k === kind.value)
        && (!evidence.value || row.dataset.e === evidence.value)
        && texts[number].includes(text);
      row.hidden = !fits;
      count += fits;
    });
    shown.textContent = count === rows.length ? "" : `${count} of ${rows.length} lines`;
  };
  find.closest(".tools").hidden = false;
  find.addEventListener("input", sift);
  for (const select of [kind, evidence]) select.addEventListener("change", sift);
})();
