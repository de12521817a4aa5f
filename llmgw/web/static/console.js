// The operators' console: shows what the admin API says, nothing more. It watches over a WebSocket, and while it has none
// it reads every two seconds.
const PERIOD_MS = 2000;
const GOOD = new Set(["ready", "connected", "static"]);
const BAD = new Set(["failed", "lost", "unplaced"]);
const element = (id) => document.getElementById(id);

let token = sessionStorage.getItem("token");
const handed = new URLSearchParams(location.hash.slice(1)).get("token");
if (handed) {
  token = handed;
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
}

class Unauthorised extends Error {}

async function read(path, method = "GET") {
  const answer = await fetch(`/api/v1/${path}`, { method, headers: { authorization: `Bearer ${token}` } });
  if (answer.status === 401) throw new Unauthorised();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function ago(since, now) {
  if (since === null) return "";
  const s = Math.max(0, Math.round(now - since));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${Math.round(s / 3600)} h`;
}

function state(word) {
  const cell = document.createElement("td");
  const head = word.split(" ")[0];
  cell.className = `state ${GOOD.has(head) ? "good" : BAD.has(head) ? "bad" : "busy"}`;
  cell.textContent = word;
  return cell;
}

function cell(content) {
  const made = document.createElement("td");
  if (content instanceof Node) made.append(content);
  else made.textContent = content ?? "";
  return made;
}

function fill(id, rows) {
  const body = element(id).tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells);
    return row;
  }));
}

function why(model) {
  const block = document.createDocumentFragment();
  block.append(model.reason ?? "");
  const candidates = model.unplaced?.candidates ?? [];
  if (candidates.length) {
    const list = document.createElement("ul");
    for (const candidate of candidates) {
      const item = document.createElement("li");
      const refusals = candidate.refusals.map((r) => (r.remedy ? `${r.reason} (${r.remedy})` : r.reason));
      item.textContent = `${candidate.node}, profile ${candidate.profile}: ${refusals.join("; ")}`;
      list.append(item);
    }
    block.append(list);
  }
  return block;
}

function devices(node) {
  const list = document.createElement("ul");
  for (const device of node.devices) {
    const item = document.createElement("li");
    const faults = device.faults.map((f) => f.reason).join("; ");
    item.textContent = `${device.label} ${device.device_class}: ${faults || device.shard || "free"}`;
    list.append(item);
  }
  const block = document.createDocumentFragment();
  if (node.inventory.simulated) block.append(`simulated: ${node.inventory.simulated}`);
  block.append(list);
  return block;
}

async function show() {
  const [status, nodes, replicas, decisions] = await Promise.all(
    ["status", "nodes", "replicas", "decisions?limit=20"].map(read),
  );
  draw({ status, nodes: nodes.nodes, replicas: replicas.replicas, decisions: decisions.decisions }, status.now);
}

const PARTS = ["status", "nodes", "replicas", "decisions"];
const DECISIONS = 20;

function applied(picture, told) {
  const made = { ...picture };
  for (const [part, ids] of Object.entries(told.gone)) made[part] = made[part].filter((row) => !ids.includes(row.id));
  for (const [part, fresh] of Object.entries(told.set)) {
    if (part === "decisions") made[part] = [...fresh, ...made[part]].slice(0, DECISIONS);
    else if (!Array.isArray(fresh)) made[part] = fresh;
    else made[part] = [...new Map([...made[part], ...fresh].map((row) => [row.id, row])).values()];
  }
  return made;
}

// Ends when the connection does.
async function watch() {
  const { ticket } = await read("watch/ticket", "POST");
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const address = `${scheme}://${location.host}/api/v1/watch?parts=${PARTS.join(",")}`;
  const socket = new WebSocket(address, ["llmgw.watch.v1", `llmgw.ticket.${ticket}`]);
  let picture = null;
  socket.addEventListener("message", (event) => {
    const told = JSON.parse(event.data);
    picture = told.type === "snapshot" ? told : applied(picture, told);
    picture.decisions = picture.decisions.slice(0, DECISIONS);
    draw(picture, told.now);
  });
  await new Promise((done) => socket.addEventListener("close", done));
}

function draw({ status, nodes, replicas, decisions }, now) {
  element("cluster").textContent = `cluster ${status.cluster}, epoch ${status.epoch}, llmgw ${status.version}`;
  const health = element("health");
  health.textContent = status.healthy ? "healthy" : status.problems.join("; ");
  health.className = status.healthy ? "" : "bad";
  fill("models", status.models.map((m) => [
    cell(m.name), state(m.state), cell(m.ready === null ? `${m.wanted} endpoints` : `${m.ready}/${m.wanted}`),
    cell(why(m)), cell(ago(m.since, now)), cell(m.next),
  ]));
  fill("replicas", replicas.map((r) => [
    cell(r.id), state(r.state), cell(r.profile), cell(`${r.nodes.join(", ")}: ${r.devices.join(", ")}`),
    cell(r.reason), cell(ago(r.since, now)), cell(r.next),
  ]));
  fill("nodes", nodes.map((n) => [
    cell(n.id), state(n.drained ? `${n.state}, drained` : n.state), cell(devices(n)),
    cell(n.drained ? `${n.reason}; drained by ${n.drained.by}${n.drained.reason ? `: ${n.drained.reason}` : ""}` : n.reason),
    cell(ago(n.drained ? n.drained.at : n.since, now)), cell(n.next || n.drained?.next),
  ]));
  fill("decisions", decisions.map((d) => [
    cell(new Date(d.at * 1000).toLocaleTimeString()), cell(d.kind), cell(d.replica || d.model),
    cell(d.nodes.join(", ")),
    cell(d.reason),
  ]));
}

async function run() {
  if (token) {
    try {
      await show();
      element("view").hidden = false;
      element("sign-in").hidden = true;
      await watch();
    } catch (problem) {
      if (problem instanceof Unauthorised) {
        token = null;
        sessionStorage.removeItem("token");
      } else {
        element("health").textContent = `the control plane does not answer: ${problem.message}`;
        element("health").className = "bad";
      }
    }
  }
  if (!token) {
    element("view").hidden = true;
    element("sign-in").hidden = false;
  }
  setTimeout(run, PERIOD_MS);
}

element("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token = element("token").value.trim();
  sessionStorage.setItem("token", token);
  element("token").value = "";
});
run();
