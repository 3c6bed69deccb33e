// Gives the frames of live pages the height of their contents, and the light or dark theme of the documentation.
"use strict";

{
  const root = document.documentElement;
  const frames = () => [...document.querySelectorAll("iframe.live")];
  const sendTheme = (frame) => frame.contentWindow?.postMessage({ theme: root.dataset.theme }, "*");
  const sendAll = () => frames().forEach(sendTheme);
  window.addEventListener("message", ({ data, source }) => {
    const frame = frames().find((each) => each.contentWindow === source);
    if (!frame) return;
    if (data.ready) sendTheme(frame);
    if (data.height) frame.style.height = `${data.height + frame.offsetHeight - frame.clientHeight}px`;
  });
  new MutationObserver(sendAll).observe(root, { attributeFilter: ["data-theme"] });
  sendAll(); // to frames that were ready before this script
}
