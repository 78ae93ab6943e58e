// What the server tells: streams that connect again by themselves, and requests.

const base = new URL(".", location.href).pathname;

/**
 * Opens a stream; `handlers` by the name of its events. `lost` hears whether the stream is broken. Returns what closes it.
 * A tab that isn't shown closes its stream: all tabs share the browser's six connections to a server, and requests would wait
 * for a free one. A new stream begins with the whole state.
 */
export function follow(path, handlers, lost) {
  let source = null;
  const open = () => {
    source = new EventSource(base + path);
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
    source.onopen = () => lost(false);
    source.onerror = () => lost(true);
  };
  const close = () => {
    source?.close();
    source = null;
  };
  const look = () => {
    if (document.hidden) close();
    else if (!source) open();
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    document.removeEventListener("visibilitychange", look);
    close();
  };
}

export async function ask(path) {
  return answer(await fetch(base + path));
}

/** Asks for a change. The header keeps pages of other origins from doing so. */
export async function act(path) {
  return answer(await fetch(base + path, { method: "POST", headers: { "x-prepull": "1" } }));
}

async function answer(response) {
  const text = await response.text();
  if (!response.ok) throw new Error(text || `the server answered ${response.status}`);
  return text ? JSON.parse(text) : null;
}

export const path = (...parts) => parts.map(encodeURIComponent).join("/");
