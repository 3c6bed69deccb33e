// Follows the light or dark theme of the system. If the page is in a frame, follows the theme of the page around it, and
// tells that page the height of the content, so that the frame does not need a scroll bar.
"use strict";

{
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    window.dispatchEvent(new Event("themechange"));
  };
  const followSystem = () => setTheme(system.matches ? "dark" : "light");
  followSystem();
  system.addEventListener("change", followSystem);
  if (window.self !== window.top) {
    root.classList.add("framed");
    const send = (message) => window.parent.postMessage(message, "*");
    const sendHeight = () => send({ height: Math.ceil(root.getBoundingClientRect().height) });
    window.addEventListener("message", ({ data, source }) => {
      if (source !== window.parent || !["light", "dark"].includes(data.theme)) return;
      system.removeEventListener("change", followSystem);
      setTheme(data.theme);
      sendHeight();
    });
    new ResizeObserver(sendHeight).observe(root);
    send({ ready: true });
  }
}
