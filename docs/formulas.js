// Draws a page's formulas with KaTeX 0.16.22, which is part of the site: docs/assets/katex.
(function () {
  const folder = new URL("assets/katex/", document.currentScript.src);

  function load(kind, address) {
    const element = document.createElement(kind);
    Object.assign(element, address);
    document.head.appendChild(element);
    return element;
  }

  function draw() {
    for (const element of document.querySelectorAll(".arithmatex")) {
      // What pymdownx.arithmatex writes: \(...\) in a line, \[...\] on its own.
      const text = element.textContent.trim();
      katex.render(text.slice(2, -2), element, {
        displayMode: text.startsWith("\\["),
        throwOnError: false,
      });
    }
  }

  document.addEventListener("DOMContentLoaded", function () {
    if (document.querySelector(".arithmatex") === null) return;
    load("link", { rel: "stylesheet", href: new URL("katex.min.css", folder) });
    load("script", { src: new URL("katex.min.js", folder) }).onload = draw;
  });
})();
