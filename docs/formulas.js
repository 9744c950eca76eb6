// Draws the formulas of a page by KaTeX, which only pages with formulas ask for.
(function () {
  const from = "https://cdn.jsdelivr.net/npm/katex@0.16.22/dist/";
  const style = "sha384-5TcZemv2l/9On385z///+d7MSYlvIEw9FuZTIdZ14vJLqWphw7e7ZPuOiCHJcFCP";
  const code = "sha384-cMkvdD8LoxVzGF/RPUKAcvmm49FQ0oxwDF3BGKtDXcEc+T1b2N+teh/OJfpU0jr6";

  function ask(kind, address, integrity) {
    const element = document.createElement(kind);
    Object.assign(element, { crossOrigin: "anonymous", integrity: integrity }, address);
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
    ask("link", { rel: "stylesheet", href: from + "katex.min.css" }, style);
    ask("script", { src: from + "katex.min.js" }, code).onload = draw;
  });
})();
