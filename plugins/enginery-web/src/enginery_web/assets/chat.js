// The conversation that is open: asking, stopping, asking again. A question that gets no answer comes back into the field.

import { Answer } from "./answer.js";
import { isKept, load, newConversation, save } from "./conversations.js";
import { find, show } from "./dom.js";
import { Frames } from "./frames.js";
import { openId, showHistory } from "./history.js";
import { indexOf, showFailure, showMessages, viewAt } from "./log.js";
import { follow, goToEnd } from "./scrolling.js";
import { ask, eventsOf, inWords } from "./server.js";
import { sampling, systemPrompt } from "./settings.js";
import { forgetSpoken } from "./spoken.js";

const NO_ROOM = "The browser has no room for this conversation: export and delete some, or it is gone when the page is closed.";
let conversation = newConversation();
let running = null;  // the answer that comes: {answer, of, abort, wasKept}
const act = { edit, regenerate };

export async function send() {
  open();  // the browser tells of another address a moment later
  const field = find("say"), said = field.value.trim(), of = conversation;
  if (running || !said) return;
  field.value = "";
  const answered = await answerTo([...of.messages, { role: "user", content: said }]);
  if (!answered && of === conversation) field.value = field.value || said;
}

async function edit(view, text) {
  const index = indexOf(view), of = conversation;
  if (running) return;
  const answered = await answerTo([...of.messages.slice(0, index), { role: "user", content: text }]);
  if (!answered && of === conversation) viewAt(index).edit(text);
}

function regenerate(view) {
  if (!running) answerTo(conversation.messages.slice(0, indexOf(view)));
}

export function stop() {
  if (running) running.abort.abort();
}

// The answer to `messages` takes the place of what came after them. Resolves to whether there is one, or a part of one.
async function answerTo(messages) {
  const answer = new Answer(find("model").value), of = conversation, before = of.messages, abort = new AbortController();
  running = { answer, of, abort };
  of.messages = [...messages, answer.message];
  running.wasKept = begin();
  const problem = await receive(answer, messages, abort.signal), stopped = abort.signal.aborted;
  answer.end(stopped);
  if (problem) answer.message.finish = "failed";
  const isVain = answer.isEmpty && (problem !== "" || stopped), isQuestion = messages.length > before.length;
  if (isVain) of.messages = before;
  const kept = isVain && isQuestion ? running.wasKept : settle(running);  // a new question stays kept, for whoever comes back to it
  running = null;
  setRunning(false);
  if (of === conversation) end(answer, problem || (kept ? "" : NO_ROOM));
  return !isVain;
}

// Resolves to what went wrong, in words.
async function receive(answer, messages, signal) {
  const view = viewAt(-1), body = JSON.stringify(requestBody(messages));
  const frames = new Frames(() => {
    view.come();
    follow();
  });
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal, body };
    for await (const event of eventsOf(await ask("v1/chat/completions", options))) {
      answer.take(event);
      frames.request();
    }
    return "";
  } catch (error) {
    return error.name === "AbortError" ? "" : inWords(error);
  } finally {
    frames.cancel();
  }
}

function requestBody(messages) {
  const sent = messages.map(({ role, content }) => ({ role, content })), system = systemPrompt();
  if (system) sent.unshift({ role: "system", content: system });
  return { model: find("model").value, messages: sent, stream: true, stream_options: { include_usage: true }, ...sampling() };
}

// Whether the browser had room for the question.
function begin() {
  forgetSpoken();
  showFailure("");
  showMessages(conversation.messages, act);
  viewAt(-1).come();
  const kept = save(conversation);
  if (openId() !== conversation.id) history.replaceState(null, "", `#${conversation.id}`);
  showHistory();
  setRunning(true);
  goToEnd();
  return kept;
}

function end(answer, problem) {
  showMessages(conversation.messages, act);
  const view = viewAt(-1);
  if (view && view.message === answer.message) {
    view.finish();
    view.speak(Infinity);
  }
  showFailure(problem);
  follow();
}

// Whether what is left of a conversation is kept; one that was deleted in the meantime stays so.
function settle({ of, wasKept }) {
  const isDeleted = wasKept && !isKept(of.id), kept = isDeleted || save(of);
  showHistory();
  return kept;
}

// The field takes the focus when nothing else has it, unless that would open a keyboard over the answer.
function setRunning(on) {
  const isFree = matchMedia("(hover: hover)").matches && [document.body, find("stop")].includes(document.activeElement);
  show(find("send"), !on);
  show(find("stop"), on);
  find("log").setAttribute("aria-busy", String(on));
  if (!on && isFree) find("say").focus();
}

// Opens the conversation that the address names, or a new one. A question that was never answered comes back into the field.
function open() {
  if (openId() === conversation.id) return;
  stop();
  conversation = load(openId()) || newConversation();
  const last = conversation.messages.at(-1), field = find("say");
  if (last && last.role === "user") field.value = field.value || conversation.messages.pop().content;
  showFailure("");
  showMessages(conversation.messages, act);
  goToEnd();
}

// The browser leaves the page in the middle of an answer.
function leave() {
  if (!running) return;
  running.answer.end(true);
  settle(running);
}

export function startChat() {
  window.addEventListener("hashchange", open);
  window.addEventListener("pagehide", leave);
  open();
}
