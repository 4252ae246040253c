// News from the server. The browser reconnects by itself; when it cannot, the page keeps what it has.

const GIVE_UP_MS = 30000; // then the server is gone rather than slow

export function listen({ onStatus, onGrown, onLink }) {
  let source = null;
  let lastHeard = Date.now();
  let retry = 0;

  const open = () => {
    clearTimeout(retry);
    source?.close();
    source = new EventSource("/events");
    source.onopen = () => {
      lastHeard = Date.now();
      onLink("live");
    };
    source.onerror = () => {
      const gone = Date.now() - lastHeard > GIVE_UP_MS;
      onLink(gone ? "gone" : "lost");
      if (source.readyState === EventSource.CLOSED) retry = setTimeout(open, 3000);
    };
    source.addEventListener("status", (event) => onStatus(JSON.parse(event.data)));
    source.addEventListener("grown", (event) => onGrown(JSON.parse(event.data)));
  };

  // A page in the background costs nothing: it hangs up, and comes back when it is seen again.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      clearTimeout(retry);
    } else open();
  });
  window.addEventListener("online", open);
  if (!document.hidden) open();
}
