// The API, drawn from openapi.json without anything from elsewhere.

import { get } from "./api.js";
import { make } from "./ranking.js";

function resolve(schema, api) {
  return schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

function kind(schema, api) {
  const found = resolve(schema, api) ?? {};
  if (found.anyOf) return found.anyOf.map((one) => kind(one, api)).join(" or ");
  if (found.enum) return found.enum.join(", ");
  if (found.type === "array") return `list of ${kind(found.items, api)}`;
  if (schema.$ref) return found.title;
  return found.type ?? "any";
}

function limits(schema) {
  const inside = schema.anyOf?.find((one) => one.type !== "null") ?? schema;
  const named = {
    minimum: "at least #", maximum: "at most #", minLength: "at least # characters", maxLength: "at most # characters",
    minItems: "at least # items", maxItems: "at most # items",
  };
  const said = Object.entries(named).filter(([key]) => inside[key] > 0 || inside[key] < 0).map(([key, words]) => words.replace("#", inside[key]));
  if (schema.default !== undefined && schema.default !== null) said.push(`default ${JSON.stringify(schema.default)}`);
  return said.join(", ");
}

function table(rows, api) {
  const body = rows.map(([name, schema, wanted]) => make(
    "tr", {},
    make("th", { scope: "row" }, name, ...(wanted ? [] : [make("small", {}, " optional")])),
    make("td", {}, [kind(schema, api), limits(schema)].filter(Boolean).join("; ")),
    make("td", {}, schema.description ?? resolve(schema, api)?.description ?? ""),
  ));
  return make("table", {}, make("tbody", {}, ...body));
}

function route(method, path, said, api) {
  const section = make("section", { class: "route" }, make("h2", {}, `${method.toUpperCase()} ${path}`), make("p", {}, said.description ?? said.summary ?? ""));
  const asked = (said.parameters ?? []).map((one) => [one.name, { description: one.description, ...one.schema }, one.required]);
  const properties = (schema) => Object.entries(schema?.properties ?? {}).map(([name, one]) => [name, one, schema.required?.includes(name)]);
  asked.push(...properties(resolve(said.requestBody?.content?.["application/json"]?.schema, api)));
  if (asked.length) section.append(make("h3", {}, "Request"), table(asked, api));
  const answer = properties(resolve(said.responses?.["200"]?.content?.["application/json"]?.schema, api));
  if (answer.length) section.append(make("h3", {}, "Answer"), table(answer.map(([name, one]) => [name, one, true]), api));
  return section;
}

try {
  const api = await get("openapi.json");
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, said] of Object.entries(methods)) document.getElementById("routes").append(route(method, path, said, api));
  }
} catch (error) {
  document.getElementById("trouble-text").textContent = error.status === 401 ? "Give the token on the explorer's page first." : error.message;
}
