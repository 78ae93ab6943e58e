// What the server tells: streams that connect again by themselves, and requests.

const base = new URL(".", location.href).pathname;
/** Longest wait for a list, which takes the server several requests over a line that may be slow. */
const ASKED_WITHIN = 60000;
/** Longest wait for a change: three requests of the 10 s of --request-timeout. One that comes later is no longer wanted. */
const ACTED_WITHIN = 30000;

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
  return send(path, ASKED_WITHIN, {});
}

/** Asks for a change. The header keeps pages of other origins from doing so. */
export async function act(path) {
  return send(path, ACTED_WITHIN, { method: "POST", headers: { "x-prepull": "1" } });
}

/** A request that waits in the browser for a connection is never sent once its time is over. */
async function send(path, within, options) {
  try {
    return await answer(await fetch(base + path, { ...options, signal: AbortSignal.timeout(within) }));
  } catch (error) {
    if (error.name !== "TimeoutError") throw error;
    throw new Error(`there was no answer within ${within / 1000} s. The browser has six connections for all windows of this page: close some of them if there are several`);
  }
}

async function answer(response) {
  const text = await response.text();
  if (!response.ok) throw new Error(text || `the server answered ${response.status}`);
  return text ? JSON.parse(text) : null;
}

export const path = (...parts) => parts.map(encodeURIComponent).join("/");
