// Shows the robots' state as the server sends it, and sends orders and axes back.
"use strict";
const KEYS = [["a", "d"], ["s", "w"], ["f", "r"], ["q", "e"], ["j", "l"], ["k", "i"], ["u", "o"], ["n", "m"], ["v", "b"]];
const GRIPPER_KEYS = ["z", "x"];
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
const AXES_EVERY = 50; // milliseconds; the server releases axes that are older than half a second
const $ = (selector, root = document) => root.querySelector(selector);
const cards = [];
const images = new Map(); // "robot/camera" -> address of its newest frame
const held = new Map(); // axis -> -1 or 1, while a button or key is down
let about = { axes: [], low: [], high: [], fps: 0 };
let state = null;
let socket = null;
let shownEvents = "";
let ordered = null; // time of the last takeover order of this page
const measured = { takeover: null, stop: null }; // milliseconds from a click to a state that shows it

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/live`);
  socket.binaryType = "blob";
  socket.onopen = () => link("connected", true);
  socket.onclose = () => {
    link("no connection: what is shown is old", false);
    document.body.classList.add("lost");
    setTimeout(connect, 1000);
  };
  socket.onmessage = (event) => {
    if (event.data instanceof Blob) return frame(event.data);
    const message = JSON.parse(event.data);
    if (message.about) prepare(message.about);
    if (message.state) {
      update(message.state);
      requestAnimationFrame(() => socket.readyState === WebSocket.OPEN && socket.send("shown"));
    }
    if (message.problem) problem(message.problem);
  };
}

function send(message) {
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function link(text, on) {
  const element = $("#link");
  element.textContent = text;
  element.classList.toggle("on", on);
}

let clearing = 0;
function problem(text) {
  const element = $("#problem");
  element.textContent = text;
  element.hidden = !text;
  clearTimeout(clearing);
  clearing = setTimeout(() => (element.hidden = true), 5000);
}

// --- state -----------------------------------------------------------------------------------------------------------

function update(next) {
  state = next;
  document.body.classList.remove("lost");
  while (cards.length < state.robots.length) cards.push(makeCard(cards.length));
  state.robots.forEach((robot, place) => showRobot(cards[place], robot, place));
  showCounts();
  showQueue();
  showEvents();
  showOperated();
  $("#release").hidden = !state.stopped;
  $("#stop").disabled = state.stopped;
  measure();
}

function measure() {
  if (!ordered) return;
  const mine = ordered.kind === "takeover" && state.mine === ordered.robot;
  const all = ordered.kind === "stop" && state.robots.every((robot) => robot.mode === "stopped");
  if (mine || all) {
    measured[ordered.kind] = performance.now() - ordered.time;
    ordered = null;
  }
}

function makeCard(place) {
  const card = $("#robot").content.firstElementChild.cloneNode(true);
  $(".take", card).onclick = () => {
    ordered = { kind: "takeover", robot: place, time: performance.now() };
    send({ do: "take", robot: place });
  };
  $(".ask", card).onclick = () => send({ do: "ask", robot: place });
  $(".dismiss", card).onclick = () => send({ do: "dismiss", robot: place });
  $("#robots").append(card);
  return card;
}

function showRobot(card, robot, place) {
  card.dataset.mode = robot.away ? "away" : robot.mode;
  text($("h3", card), robot.name);
  text($(".mode", card), robot.away ? "no connection" : robot.mode + (robot.place ? `, ${ordinal(robot.place)}` : ""));
  showViews($(".views", card), robot, place);
  plan($(".plan", card), robot.plan || []);
  index(card, robot);
  const facts = [];
  if (robot.latency_ms !== null) facts.push(`latency ${robot.latency_ms.toFixed(robot.latency_ms < 10 ? 1 : 0)} ms`);
  facts.push(`step ${robot.steps}`);
  if (robot.episodes) facts.push(`episode ${robot.episodes}`);
  const why = robot.operator ? `${robot.operator === state.me ? "you" : robot.operator} act` + (robot.operator === state.me ? "" : "s") : robot.reason;
  const element = $(".facts", card);
  text(element, facts.join(" · "));
  if (why) element.append(document.createElement("br"), Object.assign(document.createElement("b"), { textContent: why }));
  const asks = ["holding", "rewinding", "waiting"].includes(robot.mode);
  $(".take", card).disabled = state.stopped || robot.away || state.mine !== null || robot.mode === "operated";
  $(".ask", card).hidden = robot.away || robot.mode !== "autonomous";
  $(".dismiss", card).hidden = !asks;
}

function ordinal(number) {
  return number === 1 ? "next" : `${number} in line`;
}

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function showViews(container, robot, place) {
  for (const camera of robot.cameras) {
    let figure = [...container.children].find((each) => each.dataset.camera === camera);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.camera = camera;
      figure.append(new Image(), Object.assign(document.createElement("figcaption"), { textContent: camera }));
      container.append(figure);
    }
    const address = images.get(`${place}/${camera}`);
    if (address && figure.firstChild.src !== address) figure.firstChild.src = address;
    figure.firstChild.alt = `${camera} of ${robot.name}`;
  }
  for (const figure of [...container.children]) if (!robot.cameras.includes(figure.dataset.camera)) figure.remove();
}

async function frame(blob) {
  const head = new Uint8Array(await blob.slice(0, 3).arrayBuffer());
  const robot = head[0] * 256 + head[1];
  const camera = await blob.slice(3, 3 + head[2]).text();
  const key = `${robot}/${camera}`;
  const before = images.get(key);
  images.set(key, URL.createObjectURL(blob.slice(3 + head[2], blob.size, "image/jpeg")));
  if (before) setTimeout(() => URL.revokeObjectURL(before), 1000);
}

function pencil(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  return [context, width, height];
}

function curve(context, values, width, height, low, high, colour) {
  const range = high - low || 1;
  context.strokeStyle = colour;
  context.beginPath();
  values.forEach((value, place) => {
    const x = 3 + ((width - 6) * place) / Math.max(values.length - 1, 1);
    const y = height - 4 - ((height - 8) * (value - low)) / range;
    place ? context.lineTo(x, y) : context.moveTo(x, y);
  });
  if (values.length === 1) context.lineTo(width - 3, height - 4 - ((height - 8) * (values[0] - low)) / range);
  context.stroke();
}

function plan(canvas, steps) {
  const [context, width, height] = pencil(canvas);
  for (let axis = 0; axis < about.axes.length; axis++) {
    const values = steps.map((step) => step[axis]);
    if (!values.length) continue;
    const low = about.low[axis] ?? Math.min(...values), high = about.high[axis] ?? Math.max(...values);
    curve(context, values, width, height, low, high, COLOURS[axis % COLOURS.length]);
  }
}

function index(card, robot) {
  const canvas = $(".index", card);
  const [context, width, height] = pencil(canvas);
  const names = Object.keys(robot.index);
  names.forEach((name, place) => {
    const values = robot.index[name];
    const colour = robot.alarms.includes(name) ? "#c3281b" : COLOURS[place % COLOURS.length];
    curve(context, values, width, height, Math.min(0, ...values), Math.max(...values, 1e-9), colour);
  });
  const newest = names.map((name) => `${name} ${robot.index[name].at(-1)}`);
  text(canvas.nextElementSibling, newest.length ? newest.join(", ") : "No detector");
}

function showCounts() {
  const counts = new Map();
  for (const robot of state.robots) {
    const mode = robot.away ? "away" : robot.mode;
    counts.set(mode, (counts.get(mode) || 0) + 1);
  }
  const shown = [...counts].map(([mode, count]) => `${mode}|${count}`).join();
  const container = $("#counts");
  if (container.dataset.shown === shown) return;
  container.dataset.shown = shown;
  container.replaceChildren(
    ...[...counts].map(([mode, count]) => {
      const chip = Object.assign(document.createElement("span"), { textContent: `${count} ${mode}` });
      chip.dataset.mode = mode;
      return chip;
    }),
  );
}

function item(mode, words, when) {
  const line = document.createElement("li");
  line.dataset.mode = mode;
  line.append(Object.assign(document.createElement("span"), { textContent: words }));
  if (when !== undefined) line.append(Object.assign(document.createElement("time"), { textContent: when }));
  return line;
}

function showQueue() {
  const waiting = state.robots.filter((robot) => robot.place).sort((one, other) => one.place - other.place);
  const shown = waiting.map((robot) => robot.name + robot.reason).join() || "-";
  const list = $("#queue");
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  const lines = waiting.map((robot) => item("waiting", robot.reason ? `${robot.name}: ${robot.reason}` : robot.name));
  const none = Object.assign(document.createElement("li"), { className: "none", textContent: "Nobody waits" });
  list.replaceChildren(...(lines.length ? lines : [none]));
}

function showEvents() {
  const newest = state.events.at(-1);
  const mark = newest ? `${newest.time}${newest.robot}${newest.mode}${state.events.length}` : "";
  if (mark === shownEvents) return;
  shownEvents = mark;
  const lines = state.events.map((event) => {
    const detail = event.mode === "operated" ? `by ${event.operator}` : event.reason;
    const time = new Date(1000 * event.time).toLocaleTimeString("en-GB");
    return item(event.mode, `${event.robot} ${event.mode}${detail ? `: ${detail}` : ""}`, time);
  });
  $("#events").replaceChildren(...lines.reverse());
}

// --- operating a robot -----------------------------------------------------------------------------------------------

function prepare(given) {
  about = given;
  let free = 0;
  const pads = about.axes.map((name, axis) => {
    const keys = name.includes("gripper") ? GRIPPER_KEYS : KEYS[free++] || ["", ""];
    const pad = document.createElement("div");
    pad.className = "pad";
    const head = Object.assign(document.createElement("div"), { className: "name" });
    head.append(Object.assign(document.createElement("span"), { textContent: name.replaceAll("_", " ") }));
    head.append(Object.assign(document.createElement("output"), { textContent: "" }));
    const pair = Object.assign(document.createElement("div"), { className: "pair" });
    [-1, 1].forEach((sign, side) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: sign < 0 ? "−" : "+" });
      button.ariaLabel = `${name} ${sign < 0 ? "minus" : "plus"}`;
      if (keys[side]) button.append(Object.assign(document.createElement("kbd"), { textContent: keys[side] }));
      button.dataset.key = keys[side];
      button.dataset.axis = axis;
      button.dataset.sign = sign;
      button.onpointerdown = (event) => {
        button.setPointerCapture(event.pointerId);
        press(button, true);
      };
      button.onpointerup = button.onpointercancel = button.onlostpointercapture = () => press(button, false);
      button.oncontextmenu = (event) => event.preventDefault();
      pair.append(button);
    });
    pad.append(head, pair);
    return pad;
  });
  $("#pads").replaceChildren(...pads);
}

function press(button, down) {
  const axis = Number(button.dataset.axis), sign = Number(button.dataset.sign);
  button.classList.toggle("on", down);
  if (down) held.set(axis, sign);
  else if (held.get(axis) === sign) held.delete(axis);
}

function buttonOf(key) {
  return [...document.querySelectorAll("#pads button")].find((button) => button.dataset.key === key);
}

addEventListener("keydown", (event) => {
  if (!state || state.mine === null || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = buttonOf(event.key.toLowerCase());
  if (button) press(button, true);
});
addEventListener("keyup", (event) => {
  const button = buttonOf(event.key.toLowerCase());
  if (button) press(button, false);
});
function releaseAll() {
  for (const button of document.querySelectorAll("#pads button.on")) press(button, false);
}
addEventListener("blur", releaseAll);
document.addEventListener("visibilitychange", releaseAll);

// Sticks and triggers in the order of the axes; a gripper takes the triggers.
function gamepadAxes() {
  const pad = [...(navigator.getGamepads ? navigator.getGamepads() : [])].find(Boolean);
  if (!pad) return [];
  const stick = (place, sign) => (Math.abs(pad.axes[place] || 0) > 0.12 ? sign * pad.axes[place] : 0);
  const pair = (minus, plus) => (pad.buttons[plus]?.value || 0) - (pad.buttons[minus]?.value || 0);
  const rest = [stick(0, 1), stick(1, -1), stick(3, -1), stick(2, 1), pair(4, 5), pair(14, 15), pair(13, 12)];
  return about.axes.map((name) => (name.includes("gripper") ? pair(6, 7) : rest.shift() || 0));
}

setInterval(() => {
  if (!state || state.mine === null) return;
  const speed = Number($("#speed").value) / 100;
  const pad = gamepadAxes();
  const axes = about.axes.map((name, axis) => speed * (held.get(axis) ?? pad[axis] ?? 0));
  send({ do: "axes", axes });
}, AXES_EVERY);

function showOperated() {
  const section = $("#operate");
  section.hidden = state.mine === null;
  if (section.hidden) return releaseAll();
  const robot = state.robots[state.mine];
  text($("h2", section), `You operate ${robot.name}`);
  showViews($(".views", section), robot, state.mine);
  [...document.querySelectorAll("#pads output")].forEach((output, axis) => {
    text(output, robot.action ? (robot.action[axis] ?? 0).toFixed(2) : "");
  });
}

$("#back").onclick = () => state.mine === null || send({ do: "hand_back", robot: state.mine });  // the episode is over
$("#stop").onclick = () => {
  ordered = { kind: "stop", time: performance.now() };
  send({ do: "stop" });
};
$("#release").onclick = () => send({ do: "release" });
$("#speed").oninput = (event) => text($(".speed output"), `${event.target.value} %`);
connect();
