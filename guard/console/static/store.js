// The requests that ended last, kept up to date with one question at a time that waits for the next one.

import { get } from "./api.js";

const MOST = 1400; // what a process keeps: a thousand that a policy judged, 400 others
const WAIT_S = 20;
const AGAIN_MS = 2000;
const BETWEEN_MS = 400; // however many requests end meanwhile

const pause = (duration) => new Promise((done) => setTimeout(done, duration));

export class Store extends EventTarget {
  requests = []; // the newest first
  count = 0; // of all that were ever told of
  reached = true;
  missing = []; // worker processes that did not answer
  #cursor = "";
  #stop = null;

  start() {
    this.stop();
    this.#stop = new AbortController();
    this.#follow(this.#stop.signal);
  }

  stop() {
    this.#stop?.abort();
    this.#stop = null;
  }

  /** Forget everything: somebody else may sign in. */
  clear() {
    this.requests = [];
    this.count = 0;
    this.missing = [];
    this.#cursor = "";
    this.dispatchEvent(new Event("cleared"));
  }

  async #follow(signal) {
    let wait = 0; // the first answer comes at once
    while (!signal.aborted) {
      try {
        const told = await get(`/requests?after=${this.#cursor}&wait_s=${wait}`, signal);
        wait = WAIT_S;
        this.#take(told);
        if (!told.more) await pause(BETWEEN_MS);
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return this.dispatchEvent(new Event("signed-out"));
        this.#reached(false);
        await pause(AGAIN_MS);
      }
    }
  }

  #take({ cursor, missing, requests }) {
    this.#reached(true, missing);
    this.#cursor = cursor;
    if (requests.length === 0) return;
    this.count += requests.length;
    this.requests = [...requests.reverse(), ...this.requests].slice(0, MOST);
    this.dispatchEvent(new Event("requests"));
  }

  #reached(now, missing = []) {
    if (now === this.reached && missing.join() === this.missing.join()) return;
    this.reached = now;
    this.missing = missing;
    this.dispatchEvent(new Event("reached"));
  }
}

export const store = new Store();
