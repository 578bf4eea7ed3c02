// Requests to the server: the token, if it wants one, and errors in words.

const KEY = "offsphere-token";

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token);
}

export async function get(path, values = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const asked = new URLSearchParams(values).toString();
  let response;
  try {
    response = await fetch(asked ? `${path}?${asked}` : path, { headers });
  } catch {
    throw new Refused(0, "The server does not answer. Is it still running?");
  }
  let body;
  try {
    body = await response.json();
  } catch {
    throw new Refused(response.status, `The server answered ${response.status} without JSON.`);
  }
  if (!response.ok) throw new Refused(response.status, body.detail);
  return body;
}
