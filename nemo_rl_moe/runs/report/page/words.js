// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Texts and elements. Content of a run only becomes text of an element.

// Control characters, and characters that change the direction of text, are escaped.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

function visible(text) {
  return String(text).replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return made;
}

function card(title, caption, ...children) {
  return element(
    "section",
    { class: "card" },
    element("h3", {}, title),
    element("p", { class: "caption" }, caption),
    ...children,
  );
}

// Plotly interprets some markup in texts. With entities, it shows the text verbatim.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function chip(color) {
  const made = element("span", { class: "chip" });
  made.style.background = color;
  return made;
}
