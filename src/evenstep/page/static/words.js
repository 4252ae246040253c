// How numbers and times are written.

export function number(value) {
  if (!Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-US");
  if (value === 0) return "0";
  return String(Number(value.toPrecision(3)));
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function megabytes(bytes) {
  return count(bytes / 1e6);
}

export function percent(part) {
  return `${Math.round(100 * part)} %`;
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes}:${pad(seconds % 60)} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 100) return `${hours}:${pad(minutes % 60)} h`;
  return `${Math.round(hours / 24)} days`;
}

// How long ago something was, without haste.
export function ago(seconds) {
  if (seconds < 1.5) return "now";
  return seconds < 10 ? `${Math.round(seconds)} s ago` : `${duration(seconds)} ago`;
}

// A time of the run's own clock.
export function clock(seconds) {
  const sign = seconds < 0 ? "-" : "";
  const s = Math.abs(seconds);
  const hours = Math.floor(s / 3600);
  const rest = `${pad((s / 60) % 60)}:${pad(s % 60)}`;
  if (s < 60) return `${sign}${s.toFixed(1)} s`;
  return hours ? `${sign}${hours}:${rest}` : `${sign}${rest}`;
}

export function milliseconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const ms = seconds * 1000;
  return `${ms >= 100 ? Math.round(ms).toLocaleString("en-US") : ms.toFixed(1)} ms`;
}

function pad(value) {
  return String(Math.floor(value)).padStart(2, "0");
}
