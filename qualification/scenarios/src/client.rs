//! A client of the Machine API that asks all the time, each time over a new connection.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer than any answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A client in the background.
#[derive(Debug)]
pub struct Client {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Heard>>,
}

/// What it heard.
#[derive(Debug, Default)]
pub struct Heard {
    /// How many good answers.
    pub answers: usize,
    /// The versions that answered, each once, in order.
    pub versions: Vec<String>,
    /// Each request that was refused, or answered by anything but 200.
    pub failures: Vec<String>,
    /// The longest time from connecting to the whole answer.
    pub longest: Duration,
}

impl Client {
    /// Starts asking for `/v1/machine` each 20 ms.
    pub(crate) fn of(socket: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut heard = Heard::default();
            while !told.load(Ordering::Relaxed) {
                let asked = Instant::now();
                match ask(&socket) {
                    Ok(version) => heard.take(version, asked.elapsed()),
                    Err(e) => heard.failures.push(format!("after {:?}: {e}", asked.elapsed())),
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            heard
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops, and says what was heard.
    pub fn stop(mut self) -> Heard {
        self.stop.store(true, Ordering::Relaxed);
        let heard = self.thread.take().map(JoinHandle::join);
        heard.and_then(Result::ok).expect("the client ended by itself")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Heard {
    fn take(&mut self, version: String, took: Duration) {
        self.answers += 1;
        self.longest = self.longest.max(took);
        if self.versions.last() != Some(&version) {
            self.versions.push(version);
        }
    }
}

/// Asks once; the version in the answer.
fn ask(socket: &PathBuf) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /v1/machine HTTP/1.1\r\nHost: machine\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let bad = |what: &str| io::Error::other(format!("{what}: {answer:?}"));
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| bad("no answer"))?;
    if !head.starts_with("HTTP/1.1 200 ") {
        return Err(bad("not 200"));
    }
    let body: serde_json::Value = serde_json::from_str(body).map_err(|_| bad("not JSON"))?;
    body["version"].as_str().map(str::to_owned).ok_or_else(|| bad("no version"))
}
