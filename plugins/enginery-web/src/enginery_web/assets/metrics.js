// Prometheus' text format, and what can be said of two readings of it.

// By name: [{labels, value}].
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: match[3] === "+Inf" ? Infinity : Number(match[3]) });
  }
  return found;
}

export function total(metrics, name) {
  const samples = metrics.get(name) || metrics.get(`${name}_total`);
  return samples ? samples.reduce((sum, sample) => sum + sample.value, 0) : null;
}

// Of several engines, as of `--dp`, each with its own share of the same.
export function mean(metrics, name) {
  return metrics.has(name) ? total(metrics, name) / metrics.get(name).length : null;
}

export function buckets(metrics, name) {
  const counts = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) || []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) || 0) + value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

// The share `q` of what came between two states of a histogram lies below it; null if nothing came.
export function quantile(before, now, q) {
  const earlier = new Map(before);
  const counts = now.map(([bound, count]) => [bound, count - (earlier.get(bound) || 0)]);
  const all = counts.length ? counts[counts.length - 1][1] : 0;
  if (!(all > 0)) return null;
  let low = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= q * all) return bound === Infinity || count === below ? low : low + (bound - low) * (q * all - below) / (count - below);
    [low, below] = [bound, count];
  }
  return low;
}
