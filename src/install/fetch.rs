//! Downloads, in two processes: the parent owns the file and the hash, the child owns DNS, TLS and HTTP and can only
//! write bytes into the pipe that it was given.
//!
//! On the pipe: one line of JSON (what is known of the length), then the bytes. How it ended is on stderr.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use reqwest::header::{CONTENT_RANGE, ETAG, IF_RANGE, LAST_MODIFIED, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, redirect};
use serde::{Deserialize, Serialize};

use super::confine;
use super::source::Settings;
use crate::command::{CommandError, Run};
use crate::host::Host;
use crate::interrupt::Interrupt;

const MOST_REDIRECTS: usize = 5;
const MOST_TRIES: u32 = 12;
const CONNECT: Duration = Duration::from_secs(10);
const USER_AGENT: &str = "ployzd";

/// What the parent asks the child for.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    url: String,
    ca: Option<String>,
    proxy: Option<String>,
    allow_http: bool,
    most: u64,
    deadline_ms: u64,
    stall_ms: u64,
}

/// The first line of the child's answer.
#[derive(Debug, Serialize, Deserialize)]
struct Opening {
    length: Option<u64>,
}

/// Why nothing, or not everything, was fetched.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum FetchError {
    /// The source says that there is no such thing.
    #[error("{url} does not exist (status {status})")]
    NotFound {
        /// What was asked for.
        url: String,
        /// The status: 404 or 410.
        status: u16,
    },
    /// The source answered something that no retry changes.
    #[error("fetching {url}: {problem}")]
    Refused {
        /// What was asked for.
        url: String,
        /// What was observed.
        problem: String,
    },
    /// It did not work within the deadline; it may work later.
    #[error("fetching {url}: {problem}, after {tries} tries in {seconds} s")]
    Unreachable {
        /// What was asked for.
        url: String,
        /// What was observed last.
        problem: String,
        /// How often it was tried.
        tries: u32,
        /// For how long, in seconds.
        seconds: u64,
    },
    /// The bytes could not be taken here.
    #[error("{problem}")]
    Here {
        /// What was observed.
        problem: String,
    },
    /// A signal asked this process to end.
    #[error("cancelled by {signal}")]
    Cancelled {
        /// Which.
        signal: String,
    },
}

fn here(problem: impl Into<String>) -> FetchError {
    FetchError::Here { problem: problem.into() }
}

/// How long and how large a download may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// In bytes.
    pub(crate) most: u64,
    /// With all retries.
    pub(crate) deadline: Duration,
}

/// Is given bytes as they come, and the whole length where it is known.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&[u8], Option<u64>) -> io::Result<()>;

/// Fetches `url` in a child and gives its bytes to `sink`, with what is known of the length.
pub(crate) fn fetch(
    host: &Host,
    settings: &Settings,
    url: &str,
    bounds: Bounds,
    interrupt: &Interrupt,
    sink: Sink<'_>,
) -> Result<(), FetchError> {
    let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
    let order = Order {
        url: url.to_owned(),
        ca: settings.ca.as_ref().map(|pem| String::from_utf8_lossy(pem).into_owned()),
        proxy: settings.proxy.clone(),
        allow_http: settings.allow_http,
        most: bounds.most,
        deadline_ms: millis(bounds.deadline),
        stall_ms: millis(settings.deadlines.stall),
    };
    let order = serde_json::to_vec(&order).map_err(|e| here(e.to_string()))?;
    // The child knows its deadline and says best what went wrong; the parent's is only for a child that does not.
    let run = Run::new(host.program(), bounds.deadline + Duration::from_secs(5));
    let run = run.args(["fetch"]).account(host.untrusted()).contained().input(&order).interrupt(interrupt);
    let mut opening = Vec::new();
    let mut length = None;
    let mut total = 0u64;
    let ended = run.stream(None, &mut |mut bytes| {
        if length.is_none() {
            let (line, rest) = match bytes.iter().position(|b| *b == b'\n') {
                Some(end) => (&bytes[..end], &bytes[end + 1..]),
                None => (bytes, &[][..]),
            };
            opening.extend_from_slice(line);
            if opening.len() > 256 {
                return Err(io::Error::other("the child's answer has no opening line"));
            }
            if line.len() == bytes.len() {
                return Ok(());
            }
            length = Some(serde_json::from_slice::<Opening>(&opening)?.length);
            bytes = rest;
        }
        total += bytes.len() as u64;
        if total > bounds.most {
            return Err(io::Error::other(format!("more than {} bytes came", bounds.most)));
        }
        sink(bytes, length.flatten())
    });
    match ended {
        Ok(ended) if ended.status.success() && length.is_some() => Ok(()),
        Ok(ended) => {
            let last = ended.stderr.lines().last().unwrap_or_default();
            Err(serde_json::from_str(last).unwrap_or_else(|_| {
                let how = crate::command::how(&ended.status);
                here(format!("fetching {url}: the child {how} and said {last:?}"))
            }))
        }
        Err(CommandError::Cancelled { signal }) => Err(FetchError::Cancelled { signal: signal.into() }),
        Err(CommandError::Stream { source, .. }) => Err(here(format!("taking {url}: {source}"))),
        Err(e) => Err(here(format!("fetching {url}: {e}"))),
    }
}

/// Fetches something small into memory.
pub(crate) fn fetch_small(
    host: &Host,
    settings: &Settings,
    url: &str,
    most: u64,
    interrupt: &Interrupt,
) -> Result<Vec<u8>, FetchError> {
    let mut content = Vec::new();
    let bounds = Bounds { most, deadline: settings.deadlines.pointer };
    fetch(host, settings, url, bounds, interrupt, &mut |bytes, _| {
        content.extend_from_slice(bytes);
        Ok(())
    })?;
    Ok(content)
}

/// The child: confines itself, reads one order from stdin, writes what it fetches to stdout. Returns its exit status.
pub(crate) fn child() -> u8 {
    let fetched = confine::confine()
        .and_then(|()| confine::hide())
        .map_err(|e| here(format!("confining the fetch child: {e}")))
        .and_then(|()| read_order())
        .and_then(|order| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map_err(|e| here(e.to_string()))?.block_on(carry_out(&order))
        });
    match fetched {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{}", serde_json::to_string(&error).unwrap_or_default());
            1
        }
    }
}

fn read_order() -> Result<Order, FetchError> {
    let mut text = Vec::new();
    io::stdin().lock().take(2 * 1024 * 1024).read_to_end(&mut text).map_err(|e| here(e.to_string()))?;
    serde_json::from_slice(&text).map_err(|e| here(format!("reading the order: {e}")))
}

/// What one try came to.
enum Tried {
    Done,
    /// Worth another try, after this long if the server said so.
    Again {
        problem: String,
        after: Option<Duration>,
    },
    Final(FetchError),
}

/// What has been written so far, and what the server called the thing it came from.
struct Progress {
    out: File,
    opened: bool,
    written: u64,
    validator: Option<String>,
}

async fn carry_out(order: &Order) -> Result<(), FetchError> {
    let started = Instant::now();
    let deadline = Duration::from_millis(order.deadline_ms);
    let refused = |problem: String| FetchError::Refused { url: order.url.clone(), problem };
    let client = client(order).map_err(refused)?;
    // Not through the buffer of `Stdout`, which looks for line ends.
    let out = io::stdout().as_fd().try_clone_to_owned().map_err(|e| here(e.to_string()))?;
    let mut progress = Progress { out: File::from(out), opened: false, written: 0, validator: None };
    let mut tries = 0;
    loop {
        tries += 1;
        let left = deadline.saturating_sub(started.elapsed());
        let tried = tokio::time::timeout(left, once(&client, order, &mut progress)).await;
        let (problem, after) = match tried {
            Ok(Tried::Done) => return Ok(()),
            Ok(Tried::Final(error)) => return Err(error),
            Ok(Tried::Again { problem, after }) => (problem, after),
            Err(_) => (format!("it was not complete ({} bytes came)", progress.written), Some(left)),
        };
        let pause = after.unwrap_or_else(|| Duration::from_millis(250 << tries.min(5))).min(deadline);
        if tries >= MOST_TRIES || started.elapsed() + pause >= deadline {
            let seconds = started.elapsed().as_secs();
            return Err(FetchError::Unreachable { url: order.url.clone(), problem, tries, seconds });
        }
        tokio::time::sleep(pause).await;
    }
}

async fn once(client: &Client, order: &Order, progress: &mut Progress) -> Tried {
    let refused = |problem: String| Tried::Final(FetchError::Refused { url: order.url.clone(), problem });
    let again = |problem: String| Tried::Again { problem, after: None };
    let mut request = client.get(&order.url);
    if let Some(validator) = progress.validator.as_ref().filter(|_| progress.written > 0) {
        request = request.header(RANGE, format!("bytes={}-", progress.written)).header(IF_RANGE, validator);
    }
    let mut response = match request.send().await {
        Ok(response) => response,
        Err(e) if e.is_redirect() || is_trust(&e) => return refused(chain(&e)),
        Err(e) => return again(chain(&e)),
    };
    let status = response.status();
    let resumed = status == StatusCode::PARTIAL_CONTENT;
    match status {
        StatusCode::OK => {}
        StatusCode::PARTIAL_CONTENT
            if progress.written > 0 && resumes_at(&response) == Some(progress.written) => {}
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            // Not what was asked for: start again without a range, and skip what is already written.
            progress.validator = None;
            return again(format!("the server answered {status} with another range"));
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => {
            return Tried::Final(FetchError::NotFound { url: order.url.clone(), status: status.as_u16() });
        }
        status if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() => {
            return Tried::Again {
                problem: format!("the server answered {status}"),
                after: retry_after(&response),
            };
        }
        status if status.is_redirection() => {
            let to = response.headers().get(LOCATION).and_then(|l| l.to_str().ok()).unwrap_or("nowhere");
            return refused(format!("the server answered {status} to {to:?}"));
        }
        status => return refused(format!("the server answered {status}")),
    }
    if response.headers().contains_key(reqwest::header::CONTENT_ENCODING) {
        return refused("the server encoded the content, which was not asked for".into());
    }
    let mut skip = if resumed { 0 } else { progress.written };
    let before = if resumed { progress.written } else { 0 };
    let length = response.content_length().map(|n| n.saturating_add(before));
    if let Some(length) = length.filter(|n| *n > order.most) {
        return refused(format!("the server announces {length} bytes, more than {}", order.most));
    }
    progress.validator = validator(&response);
    if !progress.opened {
        let opening = serde_json::to_string(&Opening { length }).unwrap_or_default();
        if let Err(e) = writeln!(progress.out, "{opening}") {
            return Tried::Final(here(e.to_string()));
        }
        progress.opened = true;
    }
    loop {
        let chunk = match response.chunk().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(e) => return again(chain(&e)),
        };
        let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
        skip -= skipped as u64;
        let fresh = &chunk[skipped..];
        progress.written += fresh.len() as u64;
        if progress.written > order.most {
            return refused(format!("the server sent more than {} bytes", order.most));
        }
        if let Err(e) = progress.out.write_all(fresh) {
            return Tried::Final(here(e.to_string()));
        }
    }
    match progress.out.flush() {
        Ok(()) => Tried::Done,
        Err(e) => Tried::Final(here(e.to_string())),
    }
}

fn client(order: &Order) -> Result<Client, String> {
    let allow_http = order.allow_http;
    let policy = redirect::Policy::custom(move |attempt| {
        if attempt.previous().len() > MOST_REDIRECTS {
            return attempt.error(format!("more than {MOST_REDIRECTS} redirects"));
        }
        if attempt.url().scheme() != "https" && !(allow_http && attempt.url().scheme() == "http") {
            let refused = format!("a redirect to {}, which is not https", attempt.url());
            return attempt.error(refused);
        }
        attempt.follow()
    });
    let tls = tls(order.ca.as_deref())?;
    let builder = Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(policy)
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .read_timeout(Duration::from_millis(order.stall_ms))
        .https_only(!allow_http);
    let builder = match &order.proxy {
        Some(proxy) => {
            builder.proxy(reqwest::Proxy::all(proxy).map_err(|e| format!("proxy {proxy:?}: {e}"))?)
        }
        None => builder.no_proxy(),
    };
    builder.build().map_err(|e| chain(&e))
}

/// Trust: the system's roots, the compiled-in ones where the system has none, and root's own CA file.
fn tls(ca: Option<&str>) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    if let Some(pem) = ca {
        use rustls::pki_types::pem::PemObject;
        let mut added = 0;
        for certificate in rustls::pki_types::CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let certificate = certificate.map_err(|e| format!("ca_file is not PEM: {e}"))?;
            roots.add(certificate).map_err(|e| format!("ca_file: {e}"))?;
            added += 1;
        }
        if added == 0 {
            return Err("ca_file holds no certificate".into());
        }
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(builder.map_err(|e| e.to_string())?.with_root_certificates(roots).with_no_client_auth())
}

/// Whether the server could not be trusted: no retry changes that.
fn is_trust(error: &reqwest::Error) -> bool {
    sources(error).any(|e| {
        matches!(
            e.downcast_ref::<rustls::Error>(),
            Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)
        ) || e.to_string().contains("invalid peer certificate")
    })
}

fn sources<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |e| e.source())
}

/// An error with its causes, each said once. The URL is left out: whoever prints it has it.
fn chain(error: &reqwest::Error) -> String {
    let mut said: Vec<String> = Vec::new();
    for text in sources(error).map(ToString::to_string) {
        let text = text.split(" for url (").next().unwrap_or_default().to_owned();
        if !said.iter().any(|before| before.contains(&text)) {
            said.push(text);
        }
    }
    said.join(": ")
}

fn header<'a>(response: &'a Response, name: &reqwest::header::HeaderName) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Where a partial answer starts: `bytes 100-199/200`.
fn resumes_at(response: &Response) -> Option<u64> {
    let range = header(response, &CONTENT_RANGE)?.strip_prefix("bytes ")?;
    range.split('-').next()?.parse().ok()
}

/// What makes sure that a resumed download is of the same thing: a strong `ETag`, else the date.
fn validator(response: &Response) -> Option<String> {
    let etag = header(response, &ETAG).filter(|tag| !tag.starts_with("W/"));
    etag.or_else(|| header(response, &LAST_MODIFIED)).map(str::to_owned)
}

/// How long the server asks to be left alone: seconds or a date.
fn retry_after(response: &Response) -> Option<Duration> {
    let text = header(response, &RETRY_AFTER)?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
    Duration::try_from(date.duration_since(jiff::Timestamp::now())).ok()
}
