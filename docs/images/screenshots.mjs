// The pictures of comparing_stages.md, taken from MLflow's UI in a headless Chromium. Nothing of the project needs this.
//
//   apt-get install chromium nodejs npm           (or set CHROMIUM to any Chromium or Chrome)
//   npm install --no-save playwright-core
//   make ui RUN=runs/demo                         (leave it running)
//   node docs/images/screenshots.mjs [http://127.0.0.1:5000] [demo] [docs/images]
//
// Arguments: the UI's address, the experiment (the config's name), the folder to write to.

import fs from "node:fs";
import path from "node:path";
import { chromium } from "playwright-core";

const [base = "http://127.0.0.1:5000", experiment = "demo", folder = "docs/images"] = process.argv.slice(2);
const browsers = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const executablePath = browsers.find((file) => file && fs.existsSync(file));
if (!executablePath) throw new Error("no Chromium found: set CHROMIUM to its executable");

async function api(call, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const reply = await fetch(`${base}/api/2.0/mlflow/${call}`, options);
  if (!reply.ok) throw new Error(`${call}: ${reply.status} ${await reply.text()}`);
  return reply.json();
}

const { experiment: found } = await api(`experiments/get-by-name?experiment_name=${experiment}`);
const id = found.experiment_id;
const { runs } = await api("runs/search", { experiment_ids: [id], max_results: 200 });
const tag = (run, key) => (run.data.tags ?? []).find((each) => each.key === key)?.value;
const made = runs.filter((run) => !tag(run, "reused_run") && run.info.status === "FINISHED"); // newest first
const trained = new Map(); // stage -> its newest training
const starts = new Set(); // the pipeline's starts that trained them: later ones may have skipped all that has curves
for (const run of made) {
  const stage = tag(run, "node")?.startsWith("train_") && tag(run, "stage");
  if (!stage || trained.has(stage)) continue;
  trained.set(stage, run.info.run_id);
  starts.add(tag(run, "mlflow.parentRunId"));
}
if (!trained.size) throw new Error(`experiment ${experiment} has no finished training`);
const order = ["baseline", "first_slice", "size_upscale", "depth_upscale"];
const stages = [...trained.keys()].sort((a, b) => order.indexOf(a) - order.indexOf(b));
const last = trained.get(stages.at(-1));
const shown = made.filter((run) => starts.has(run.info.run_id) || starts.has(tag(run, "mlflow.parentRunId")));
const filter = `attributes.run_id IN (${shown.map((run) => `'${run.info.run_id}'`).join(",")})`;
const url = (page) => `${base}/#/${page}${page.includes("?") ? "&" : "?"}workflowType=machine_learning`;

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--force-color-profile=srgb"] });
const page = await browser.newPage({ viewport: { width: 1360, height: 800 }, reducedMotion: "reduce" });
fs.mkdirSync(folder, { recursive: true });

async function shoot(name, address, prepare, clip) {
  await page.goto("about:blank"); // pages differ after the # only, which alone loads nothing
  await page.goto(url(address));
  await page.waitForTimeout(4000); // the UI polls, so the network never rests

  for (const close of await page.getByRole("button", { name: /^(close|dismiss|got it|maybe later)$/i }).all()) {
    if (await close.isVisible()) await close.click().catch(() => {});
  }
  if (prepare) await prepare();
  await page.waitForTimeout(1500);
  const file = path.join(folder, `${name}.png`);
  await page.screenshot({ path: file, clip });
  console.log(`${file}  ${Math.round(fs.statSync(file).size / 1024)} KiB`);
}

// The nodes are child runs of their launch, folded away at first; charts draw unfolded rows only.
async function unfold() {
  const launches = shown.filter((run) => tag(run, "node") === "pipeline");
  for (const launch of launches.reverse()) { // from below: what unfolds moves the rows beneath it
    const box = await page.getByRole("link", { name: launch.info.run_name, exact: true }).first().boundingBox();
    await page.mouse.click(box.x - 32, box.y + box.height / 2); // the + before the name, which has no name of its own
    await page.waitForTimeout(2500);
  }
}

// Charts whose metric's name matches; pictures always stay, unless their part is folded away.
const chartsOf = (words) => async () => {
  await page.getByPlaceholder("Search metric charts").fill(words);
  await page.waitForTimeout(2500);
  await page.mouse.move(920, 185);
  await page.waitForTimeout(1500);
};

const table = `experiments/${id}/runs?searchFilter=${encodeURIComponent(filter)}`;
const charts = `${table}&compareRunsMode=CHART`;
await shoot("runs", table, unfold); // the UI remembers what is unfolded
await shoot("samples", charts, chartsOf("^samples"), { x: 200, y: 180, width: 850, height: 480 });
await shoot("curves", `experiments/${id}/runs?viewStateShareKey=stages&compareRunsMode=CHART`);
await shoot("run", `experiments/${id}/runs/${last}`);
await shoot("system", `experiments/${id}/runs/${last}/system-metrics`);
const card = { x: 200, y: 10, width: 1150, height: 380 };
await shoot("model", `models/${experiment}.${stages.at(-1)}/versions/1`, undefined, card);
await browser.close();
