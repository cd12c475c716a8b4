"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const link = byId("link"), said = byId("said"), filters = byId("filters");

  // A token stays in this tab and goes out in a header: no other site and no other port can send it.
  const token = () => sessionStorage.getItem("x402guard") || "";
  const headers = () => (token() ? { authorization: `Bearer ${token()}` } : {});
  const signIn = byId("sign-in"), stopping = byId("stopping");
  byId("signing").addEventListener("click", () => signIn.showModal());
  byId("unsigned").addEventListener("click", () => signIn.close());
  byId("sign-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("x402guard", event.target.elements.token.value.trim());
    event.target.reset();
    byId("unsigned-why").textContent = "";
    signIn.close();
    listen();
  });

  // The sections come from our own server, where every text of others is escaped.
  const place = (id, html) => {
    const section = byId(id);
    const key = section.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    section.innerHTML = html;
    if (key) for (const each of section.querySelectorAll("[data-key]")) if (each.dataset.key === key) each.focus();
  };

  let ahead = 0, following = new AbortController();
  const tick = () => {
    const now = Date.now() + ahead;
    for (const each of document.querySelectorAll("[data-until]")) {
      const seconds = Math.max(0, Math.ceil((Number(each.dataset.until) - now) / 1000));
      const text = seconds === 0 ? "over" : seconds >= 60 ? `${Math.floor(seconds / 60)} min ${seconds % 60} s` : `${seconds} s`;
      if (each.textContent !== text) each.textContent = text;
    }
  };
  setInterval(tick, 1000);

  const show = (news) => {
    said.textContent = news.error || "";
    if (news.error) return;
    ahead = news.now_ms - Date.now();
    for (const [id, html] of Object.entries(news.sections)) place(id, html);
    byId("owner").hidden = byId("stop").hidden = !news.is_owner;
    byId("signing").hidden = news.is_owner;
    link.textContent = `at ${new Date(news.now_ms).toISOString().slice(11, 19)} UTC`;
    tick();
  };

  const chosen = () => new URLSearchParams(new FormData(filters)).toString();
  const follow = async (signal) => {
    const answer = await fetch(`/events?${chosen()}`, { headers: headers(), signal });
    if (!answer.ok) {
      const why = await answer.text();
      if (answer.status === 403) {
        if (!token()) { if (!signIn.open) signIn.showModal(); return false; }
        sessionStorage.removeItem("x402guard");
        byId("unsigned-why").textContent = why;
        if (!signIn.open) signIn.showModal();
        return false;
      }
      throw new Error(why);
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let kept = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The server has ended.");
      kept += value;
      for (let end = kept.indexOf("\n\n"); end >= 0; end = kept.indexOf("\n\n")) {
        const event = kept.slice(0, end);
        kept = kept.slice(end + 2);
        if (event.startsWith("data: ")) show(JSON.parse(event.slice(6)));
      }
    }
  };
  const listen = async () => {
    following.abort();
    following = new AbortController();
    const { signal } = following;
    while (!signal.aborted) {
      try {
        if (await follow(signal) === false) return;
      } catch (error) {
        if (signal.aborted) return;
        const why = error instanceof TypeError ? "The server does not answer." : error.message;
        said.textContent = `${why} These figures are old.`;
      }
      await new Promise((resolve) => { setTimeout(resolve, 2000); });
    }
  };
  document.addEventListener("visibilitychange", () => { if (document.hidden) following.abort(); else listen(); });
  filters.querySelector("button").hidden = true;
  filters.addEventListener("submit", (event) => { event.preventDefault(); listen(); });
  filters.addEventListener("input", () => {
    history.replaceState(null, "", `/?${chosen()}`);
    clearTimeout(filters.later);
    filters.later = setTimeout(listen, 250);
  });
  listen();

  // Returns "" if it was done, else why not.
  const send = async (path, values) => {
    try {
      const answer = await fetch(path, { method: "POST", headers: headers(), body: new URLSearchParams(values) });
      return answer.ok ? "" : await answer.text();
    } catch {
      return "The server does not answer, and may have done it or not.";
    }
  };
  let meant = "";
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.ask) {
      button.disabled = true;
      said.textContent = await send("/answer", { ask: button.dataset.ask, answer: button.dataset.answer });
      button.disabled = false;
    } else if (button.dataset.session) {
      meant = button.dataset.session;
      byId("stopped-name").textContent = button.dataset.name;
      byId("reason").value = byId("unstopped").textContent = "";
      stopping.showModal();
      byId("keep").focus();
    }
  });
  byId("keep").addEventListener("click", () => stopping.close());
  byId("really").addEventListener("click", async () => {
    const why = await send("/stop", { session: meant, reason: byId("reason").value });
    byId("unstopped").textContent = why && `Not stopped: ${why}`;
    if (!why) stopping.close();
  });
})();
