// Elements from data. Text becomes text nodes and nothing else: what clients wrote is never read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. props: `on` has listeners, `style` custom properties and styles, `class` and the others are attributes;
 * null, undefined and false leave an attribute out. Children are nodes, texts, or lists of these. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same in SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, given] of Object.entries(value)) element.style.setProperty(property, given);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((one) => one !== null && one !== undefined && one !== false)
    .map((one) => (one instanceof Node ? one : document.createTextNode(String(one))));
}

/** Put these in the place of everything inside. */
export function show(element, ...children) {
  element.replaceChildren(...nodes(children));
}
