// Names and keyboard focus for parts that the theme adds while a page is shown.
function nameParts() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((part, place) =>
    part.setAttribute("aria-label", `Code block ${place + 1}`));
  document.querySelectorAll("pre > code, .md-typeset__scrollwrap").forEach(part => {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  });
  // A table without words in its head has cells there, not headings.
  document.querySelectorAll("th:empty").forEach(cell =>
    cell.replaceWith(document.createElement("td")));
}
addEventListener("load", () => {
  nameParts();
  new MutationObserver(nameParts).observe(document.body, {childList: true, subtree: true});
});
addEventListener("resize", nameParts);
