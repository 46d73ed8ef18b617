// The console's own API. The session is a cookie that no script can read; this header says that the page asks itself.

const ROOT = "/console/api";
const HEADERS = { "x-guard-console": "1" };

/** What the guard answered instead. `status` is 0 when it did not answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const get = (path, signal) => ask("GET", path, { signal });
export const post = (path, body, signal) => ask("POST", path, { body, signal });

export async function signIn(key) {
  if (!/^[\x21-\x7e]+$/.test(key)) throw new ApiError(401, "A key has letters, digits and signs, and no spaces.");
  return ask("POST", "/session", { headers: { authorization: `Bearer ${key}` } });
}

/** Whether somebody is signed in here; needs nobody to be. */
export const signedInHere = async () => (await ask("GET", "/session", {})).signed_in;

export const signOut = () => ask("DELETE", "/session", {});

async function ask(method, path, { body, headers = {}, signal } = {}) {
  const sent = { ...HEADERS, ...headers };
  if (body !== undefined) sent["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(ROOT + path, {
      method,
      headers: sent,
      signal,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The guard does not answer.");
  }
  const value = await response.json().catch(() => null);
  if (response.ok && value !== null) return value;
  throw new ApiError(response.status, value?.error?.message ?? `The guard answers with ${response.status}.`);
}
