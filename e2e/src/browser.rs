//! A headless Chromium that clicks and types like a person, controlled by its DevTools protocol.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::{SinkExt, StreamExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::cleanup::{Child, SOON, eventually};
use crate::parts;
use crate::place::Place;

/// Largest message: a screenshot of a long page.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;

/// One page of a browser of its own.
pub struct Browser {
    socket: Mutex<Socket>,
    session: String,
    _process: Child,
    _place: Arc<Place>,
}

struct Socket {
    stream: WebSocketStream<TcpStream>,
    asked: u64,
    /// Errors of the page, including logged ones.
    complaints: Vec<String>,
    /// Requests that the browser gave up because an interface of the machine has changed: another test made a network.
    interrupted: usize,
    questions: Vec<String>,
}

impl Browser {
    /// Starts a browser with an empty page of this size in CSS pixels.
    pub async fn start(width: u32, height: u32) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir("browser")?;
        let mut command = Command::new(parts::chromium()?);
        command
            .arg(format!("--user-data-dir={}", dir.display()))
            .arg(format!("--window-size={width},{height}"))
            // Without a sandbox because tests run as root; there is no other page than our own.
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args([
                "--remote-debugging-port=0",
                "--no-first-run",
                "--disable-extensions",
                "--hide-scrollbars",
            ])
            .args(["--disable-background-networking", "--disable-component-update", "about:blank"]);
        let process = Child::spawn(&place, "chromium", command)?;
        let (port, path) = eventually("the browser is there", SOON, async || {
            let told = std::fs::read_to_string(dir.join("DevToolsActivePort"))?;
            let (port, path) = told.trim().split_once('\n').context("no port yet")?;
            anyhow::Ok((port.parse::<u16>()?, path.to_owned()))
        })
        .await?;
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let config = tokio_tungstenite::tungstenite::protocol::WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE))
            .max_frame_size(Some(MAX_MESSAGE));
        let url = format!("ws://127.0.0.1:{port}{path}");
        let (stream, _) = tokio_tungstenite::client_async_with_config(url, stream, Some(config)).await?;
        let mut socket =
            Socket { stream, asked: 0, complaints: Vec::new(), interrupted: 0, questions: Vec::new() };
        let targets = socket.ask(None, "Target.getTargets", json!({})).await?;
        let pages = targets["targetInfos"].as_array().into_iter().flatten();
        let page =
            pages.into_iter().find(|target| target["type"] == "page").context("the browser has no page")?;
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        let attached = socket.ask(None, "Target.attachToTarget", attach).await?;
        let session = attached["sessionId"].as_str().context("no session")?.to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            socket.ask(Some(&session), domain, json!({})).await?;
        }
        let browser = Self { socket: Mutex::new(socket), session, _process: process, _place: place };
        browser.resize(width, height).await?;
        Ok(browser)
    }

    /// Changes the size of the window, in CSS pixels.
    pub async fn resize(&self, width: u32, height: u32) -> Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", size).await?;
        // The page may draw some of its parts again in the next frame.
        let drawn =
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(null))))";
        self.run::<Value>(drawn).await.map(drop)
    }

    async fn ask(&self, method: &str, parameters: Value) -> Result<Value> {
        self.socket.lock().await.ask(Some(&self.session), method, parameters).await
    }

    /// Opens an address, and waits until it is loaded.
    pub async fn open(&self, url: &str) -> Result<()> {
        let interrupted = AtomicUsize::new(self.socket.lock().await.interrupted);
        let opened = self.ask("Page.navigate", json!({ "url": url })).await?;
        ensure!(opened["errorText"].is_null(), "{url}: {}", opened["errorText"]);
        eventually("the page is loaded", SOON, async || {
            let state: String = self.run("document.readyState").await?;
            ensure!(state == "complete", "{state}");
            // It would lack a script.
            let now = self.socket.lock().await.interrupted;
            if interrupted.swap(now, Ordering::Relaxed) != now {
                self.ask("Page.reload", json!({})).await?;
                bail!("a request was given up");
            }
            Ok(())
        })
        .await
    }

    /// The value of an expression of JavaScript; for a promise, its result.
    pub async fn run<T: DeserializeOwned>(&self, expression: &str) -> Result<T> {
        let question = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut answer = self.ask("Runtime.evaluate", question).await?;
        if !answer["exceptionDetails"].is_null() {
            bail!("{expression}: {}", answer["exceptionDetails"]["exception"]["description"]);
        }
        let value = answer["result"]["value"].take();
        serde_json::from_value(value).with_context(|| format!("{expression} is {}", answer["result"]))
    }

    /// The visible text of the page.
    pub async fn text(&self) -> Result<String> {
        self.run("document.body.innerText").await
    }

    /// Waits until the page shows this text.
    pub async fn says(&self, text: &str) -> Result<()> {
        eventually(&format!("the page shows {text:?}"), SOON, async || {
            let said = self.text().await?;
            let complaints = self.complaints().await?;
            ensure!(said.contains(text), "it shows: {said}\nand complains: {complaints:#?}");
            Ok(())
        })
        .await
    }

    /// Clicks the middle of the button or link with this text, once it is visible and enabled.
    pub async fn click(&self, text: &str) -> Result<()> {
        let place = format!(
            "(() => {{ const found = [...document.querySelectorAll('button, a')].find((element) => \
             element.textContent.includes({text:?}) && element.offsetParent && !element.disabled); if (!found) return null; \
             found.scrollIntoView({{block: 'center'}}); const at = found.getBoundingClientRect(); \
             return [at.x + at.width / 2, at.y + at.height / 2]; }})()",
        );
        let at = eventually(&format!("there is {text:?} to click on"), SOON, async || {
            self.run::<Option<[f64; 2]>>(&place).await?.context("it is not there")
        })
        .await?;
        self.click_at(at).await
    }

    /// Clicks at a place of the window.
    pub async fn click_at(&self, [x, y]: [f64; 2]) -> Result<()> {
        self.move_to([x, y]).await?;
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
            self.ask("Input.dispatchMouseEvent", event).await?;
        }
        Ok(())
    }

    /// Moves the pointer.
    pub async fn move_to(&self, [x, y]: [f64; 2]) -> Result<()> {
        self.ask("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": x, "y": y })).await.map(drop)
    }

    /// Presses a key, by its name: `Tab`, `Enter`, `ArrowRight`.
    pub async fn press(&self, key: &str) -> Result<()> {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            "ArrowLeft" => 37,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => bail!("no code is known for the key {key}"),
        };
        for kind in ["rawKeyDown", "keyUp"] {
            let event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            self.ask("Input.dispatchKeyEvent", event).await?;
        }
        if key == "Enter" {
            let event = json!({ "type": "char", "key": key, "text": "\r" });
            self.ask("Input.dispatchKeyEvent", event).await?;
        }
        Ok(())
    }

    /// Prefers light or dark from now on, and no motion, which would blur a picture.
    pub async fn prefer(&self, scheme: &str) -> Result<()> {
        let features = json!([
            { "name": "prefers-color-scheme", "value": scheme },
            { "name": "prefers-reduced-motion", "value": "reduce" },
        ]);
        self.ask("Emulation.setEmulatedMedia", json!({ "features": features })).await.map(drop)
    }

    /// The questions that the page has asked with `confirm`. Each was answered with yes.
    pub async fn questions(&self) -> Vec<String> {
        self.socket.lock().await.questions.clone()
    }

    /// Writes a screenshot to a file, as PNG.
    pub async fn picture(&self, file: &Path) -> Result<()> {
        self.shoot(file, json!({ "format": "png" })).await
    }

    async fn shoot(&self, file: &Path, how: Value) -> Result<()> {
        let taken = self.ask("Page.captureScreenshot", how).await?;
        let picture = STANDARD.decode(taken["data"].as_str().context("no picture")?)?;
        std::fs::write(file, picture).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Writes a screenshot of the whole page, beyond the window, to a file, as PNG.
    pub async fn long_picture(&self, file: &Path) -> Result<()> {
        let [width, height]: [u32; 2] =
            self.run("[innerWidth, document.documentElement.scrollHeight]").await?;
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
        self.shoot(file, json!({ "format": "png", "captureBeyondViewport": true, "clip": clip })).await
    }

    /// What axe-core finds, a line for each rule with its first element: by these rules, or by all if there are none.
    pub async fn axe(&self, rules: &[&str]) -> Result<Vec<String>> {
        if !self.run::<bool>("'axe' in window").await? {
            let script = std::fs::read_to_string(parts::axe_core().await?)?;
            self.run::<Value>(&format!("{script}; 1")).await?;
        }
        let mut options = json!({ "resultTypes": ["violations"] });
        if !rules.is_empty() {
            options["runOnly"] = json!({ "type": "rule", "values": rules });
        }
        self.run(&format!(
            "axe.run(document, {options}).then(({{violations}}) => violations.map((found) => \
             `${{found.id}}: ${{found.help}}: ${{found.nodes.length}} × ${{found.nodes[0].html}}: ${{found.nodes[0].failureSummary}}`))",
        ))
        .await
    }

    /// Errors of the page so far.
    pub async fn complaints(&self) -> Result<Vec<String>> {
        // All earlier messages of the page come before this answer.
        self.run::<u32>("1").await?;
        Ok(self.socket.lock().await.complaints.clone())
    }
}

impl Socket {
    async fn ask(&mut self, session: Option<&str>, method: &str, parameters: Value) -> Result<Value> {
        self.asked += 1;
        let id = self.asked;
        let mut question = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = session {
            question["sessionId"] = session.into();
        }
        self.stream.send(Message::text(question.to_string())).await?;
        let answer = async {
            while let Some(message) = self.stream.next().await {
                let Message::Text(text) = message? else { continue };
                let mut told: Value = serde_json::from_str(&text)?;
                if told["id"] == id {
                    ensure!(told["error"].is_null(), "{method}: {}", told["error"]["message"]);
                    return Ok(told["result"].take());
                }
                match told["method"].as_str() {
                    Some("Page.javascriptDialogOpening") => {
                        self.questions
                            .push(told["params"]["message"].as_str().unwrap_or_default().to_owned());
                        self.asked += 1;
                        let yes = json!({ "id": self.asked, "method": "Page.handleJavaScriptDialog",
                            "params": { "accept": true }, "sessionId": session });
                        self.stream.send(Message::text(yes.to_string())).await?;
                    }
                    Some("Runtime.exceptionThrown") => {
                        let details = &told["params"]["exceptionDetails"];
                        self.complaints.push(details["exception"]["description"].to_string());
                    }
                    Some("Log.entryAdded") if told["params"]["entry"]["level"] == "error" => {
                        let text = told["params"]["entry"]["text"].to_string();
                        if text.contains("ERR_NETWORK_CHANGED") {
                            self.interrupted += 1;
                        } else {
                            self.complaints.push(text);
                        }
                    }
                    _ => {}
                }
            }
            Err(anyhow!("the browser has closed the connection"))
        };
        tokio::time::timeout(SOON, answer).await.with_context(|| format!("no answer to {method}"))?
    }
}
