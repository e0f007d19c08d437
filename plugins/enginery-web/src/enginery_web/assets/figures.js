// The live figures: one tile each, with its last minute as a curve.

import { duration } from "./answer.js";
import { find, make, makeSvg } from "./dom.js";
import { buckets, mean, quantile, total } from "./metrics.js";

const KEPT = 60, WINDOW_MS = 30000;
const rate = (value) => `${value.toFixed(value < 100 ? 1 : 0)}/s`;
const share = (value) => `${(value * 100).toFixed(1)} %`;
const TILES = [
  { title: "Output tokens", unit: rate, of: (span) => perSecond(span, "vllm:generation_tokens") },
  { title: "Prompt tokens", unit: rate, of: (span) => perSecond(span, "vllm:prompt_tokens") },
  { title: "To the first token", unit: duration, of: (span) => middle(span, "vllm:time_to_first_token_seconds") },
  { title: "Between tokens", unit: duration, of: (span) => middle(span, "vllm:inter_token_latency_seconds") },
  { title: "Requests running", unit: String, of: ({ now }) => total(now.metrics, "vllm:num_requests_running") },
  { title: "Requests waiting", unit: String, of: ({ now }) => total(now.metrics, "vllm:num_requests_waiting") },
  { title: "KV cache held", unit: share, most: 1, of: ({ now }) => mean(now.metrics, "vllm:kv_cache_usage_perc") },
  { title: "Prefix cache hits", unit: share, most: 1, of: hits },
  { title: "Tokens a verification", unit: (value) => value.toFixed(2), of: acceptanceLength },
];

function perSecond({ last, now }, name) {
  const [before, after] = [last, now].map((sample) => total(sample.metrics, name));
  return before === null || after === null || now.at <= last.at ? null : (after - before) / (now.at - last.at) * 1000;
}

function middle({ oldest, now }, name) {
  return quantile(buckets(oldest.metrics, name), buckets(now.metrics, name), 0.5);
}

function hits({ oldest, now }) {
  const [asked, found] = ["vllm:prefix_cache_queries", "vllm:prefix_cache_hits"].map((name) => total(now.metrics, name) - total(oldest.metrics, name));
  return asked > 0 ? found / asked : null;
}

// Tokens that a verification of guesses told on average; null where none was verified, as without a drafter.
function acceptanceLength({ oldest, now }) {
  const names = ["enginery:spec_decode_told_tokens", "vllm:spec_decode_num_drafts"];
  const [told, verified] = names.map((name) => total(now.metrics, name) - total(oldest.metrics, name));
  return verified > 0 ? told / verified : null;
}

export const samples = [];

export function buildTiles() {
  for (const tile of TILES) {
    const box = make(find("tiles"), "div");
    make(box, "dt", tile.title);
    tile.shown = make(box, "dd", "–");
    const picture = makeSvg(tile.shown, "svg", { viewBox: `0 0 ${KEPT - 1} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
    tile.text = tile.shown.firstChild;
    tile.curve = makeSvg(picture, "polyline", {});
    tile.values = [];
  }
}

export function takeMetrics(metrics, at) {
  const now = { metrics, at }, last = samples[samples.length - 1];
  if (last && total(metrics, "vllm:generation_tokens") < total(last.metrics, "vllm:generation_tokens")) samples.length = 0;  // it started anew
  samples.push(now);
  while (samples.length > 2 && samples[1].at < at - WINDOW_MS) samples.shift();
  const span = { now, last: samples[samples.length - 2] || now, oldest: samples[0] };
  for (const tile of TILES) showTile(tile, tile.of(span));
}

function showTile(tile, value) {
  tile.text.data = value === null || !Number.isFinite(value) ? "–" : tile.unit(value);
  tile.values = [...tile.values, value || 0].slice(-KEPT);
  const most = tile.most || Math.max(...tile.values, 1e-9), first = KEPT - tile.values.length;
  const points = tile.values.map((one, index) => `${first + index},${(0.95 - 0.9 * Math.min(1, one / most)).toFixed(3)}`);
  tile.curve.setAttribute("points", points.join(" "));
}
