//! What is answered to a request: the good answer, bent by a rule.

use std::path::Path;
use std::time::SystemTime;

use crate::body::Body;
use crate::files::{self, Part, Served};
use crate::head::Head;
use crate::rule::{Announce, RangeLie, Redirect, Rule};

/// No header is longer than this, so that a rule can't fill the memory.
const LONGEST_HEADER: u64 = 64 << 20;

/// An answer that is ready to be sent.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Everything before the body.
    pub(crate) head: Vec<u8>,
    pub(crate) body: Body,
    pub(crate) chunked: bool,
    /// Whether the connection is closed afterwards.
    pub(crate) close: bool,
}

/// An answer while it is being made.
struct Draft {
    status: u16,
    headers: Vec<(String, String)>,
    body: Body,
}

/// The answer to a request. The serial number is what makes an `ETag` that changes change.
pub(crate) fn to(head: &Head, root: &Path, rule: &Rule, serial: u64) -> Answer {
    if let Some(raw) = &rule.raw {
        let body = Body::bytes(raw.clone().into_bytes());
        return Answer { status: 0, head: Vec::new(), body, chunked: false, close: true };
    }
    let draft = if matches!(head.method.as_str(), "GET" | "HEAD") {
        draft(head, root, rule, serial)
    } else {
        Draft::page(405).with("Allow", "GET, HEAD")
    };
    framed(draft, head, rule)
}

/// The answer to something that is not a request.
pub(crate) fn refusal(status: u16, why: &str) -> Answer {
    let body = Body::bytes(format!("{why}\n").into_bytes());
    let draft = Draft { status, headers: Vec::new(), body }.with("Content-Type", "text/plain; charset=utf-8");
    framed(draft, &closing_head(), &Rule::default())
}

/// The answer to a request at the control socket.
pub(crate) fn of_text(head: &Head, status: u16, text: String) -> Answer {
    let draft = Draft { status, headers: Vec::new(), body: Body::bytes(text.into_bytes()) };
    framed(draft.with("Content-Type", "text/plain; charset=utf-8"), head, &Rule::default())
}

fn closing_head() -> Head {
    Head {
        method: "GET".to_owned(),
        path: "/".to_owned(),
        query: None,
        target: "/".to_owned(),
        headers: Vec::new(),
        keep_alive: false,
    }
}

fn draft(head: &Head, root: &Path, rule: &Rule, serial: u64) -> Draft {
    if let Some(redirect) = &rule.redirect
        && let Some(location) = location(redirect, head)
    {
        return Draft::page(rule.status.unwrap_or(302)).with("Location", &location);
    }
    let status = rule.status.filter(|_| rule.redirect.is_none());
    if let Some(body) = &rule.body {
        let body = Body::bytes(body.clone().into_bytes()).flipped(rule.flip);
        let draft = Draft { status: status.unwrap_or(200), headers: Vec::new(), body };
        return draft.with("Content-Type", "text/html; charset=utf-8");
    }
    match status {
        Some(status) if status >= 300 => Draft::page(status),
        _ => match files::open(root, &head.path) {
            Ok(served) => of_file(served, head, rule, serial, status),
            Err(status) => Draft::page(status),
        },
    }
}

/// Where a redirect leads; nowhere at the end of a chain.
fn location(redirect: &Redirect, head: &Head) -> Option<String> {
    match redirect {
        Redirect::To(url) => Some(url.clone()),
        Redirect::Loop => Some(head.target.clone()),
        Redirect::Chain(hops) => {
            let hop = head.query.as_deref().and_then(|query| query.strip_prefix("hop="));
            let next = hop.and_then(|hop| hop.parse::<u32>().ok()).unwrap_or(0).saturating_add(1);
            let path = head.target.split('?').next().unwrap_or_default();
            (next <= *hops).then(|| format!("{path}?hop={next}"))
        }
    }
}

fn of_file(mut served: Served, head: &Head, rule: &Rule, serial: u64, status: Option<u16>) -> Draft {
    let lie = rule.range;
    if matches!(lie, Some(RangeLie::ChangedEtag | RangeLie::Replaced)) {
        served.etag = format!("\"{serial}-{}", served.etag.trim_start_matches('"'));
    }
    if served.is_known(head) && status.is_none() {
        return Draft { status: 304, headers: Vec::new(), body: Body::empty() }.with("ETag", &served.etag);
    }
    let part = match (lie, served.part(head)) {
        (Some(RangeLie::Ignore), _) => Part::Whole,
        (Some(RangeLie::Refuse), _) if head.header("range").is_some() => Part::Unsatisfiable,
        (Some(RangeLie::ChangedEtag), _) => served.part_whatever_the_condition(head),
        (Some(RangeLie::Shifted), Part::Range(0, last)) => Part::Range(last.min(1), last),
        (Some(RangeLie::Shifted), Part::Range(first, last)) => Part::Range(first - 1, last),
        (_, part) => part,
    };
    let Served { file, length, etag, modified, kind } = served;
    let (good, body, range) = match part {
        Part::Whole => (200, Body::file(file, 0, length), None),
        Part::Range(first, last) => {
            let from = if lie == Some(RangeLie::Mislabelled) { 0 } else { first };
            let range = format!("bytes {first}-{last}/{length}");
            (206, Body::file(file, from, last - first + 1), Some(range))
        }
        Part::Unsatisfiable => return Draft::page(416).with("Content-Range", &format!("bytes */{length}")),
    };
    let draft = Draft { status: status.unwrap_or(good), headers: Vec::new(), body: body.flipped(rule.flip) }
        .with("Content-Type", kind)
        .with("ETag", &etag)
        .with("Last-Modified", &modified);
    let draft = if lie == Some(RangeLie::Ignore) { draft } else { draft.with("Accept-Ranges", "bytes") };
    match range {
        Some(range) => draft.with("Content-Range", &range),
        None => draft,
    }
}

impl Draft {
    /// What a web server shows for a status.
    fn page(status: u16) -> Self {
        let reason = reason(status);
        let page = format!(
            "<!DOCTYPE html>\n<html><head><title>{status} {reason}</title></head>\n\
             <body><h1>{status} {reason}</h1></body></html>\n"
        );
        Self { status, headers: Vec::new(), body: Body::bytes(page.into_bytes()) }
            .with("Content-Type", "text/html; charset=utf-8")
    }

    /// With this header, and no other of that name; none at all if the value is empty.
    fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        if !value.is_empty() {
            self.headers.push((name.to_owned(), value.to_owned()));
        }
        self
    }
}

/// Says the length, true or not, and writes the head.
fn framed(draft: Draft, request: &Head, rule: &Rule) -> Answer {
    let length = draft.body.length();
    let announce = match rule.announce {
        None if rule.endless => Some(Announce::Nothing),
        announce => announce,
    };
    let says_close = !request.keep_alive || rule.close || announce == Some(Announce::Nothing);
    let says_wrong = matches!(announce, Some(Announce::Length(said)) if said != length);
    let chunked = announce == Some(Announce::Chunked);
    let close = says_close || says_wrong || (!chunked && rule.extra > 0) || rule.endless;

    let mut draft = draft.with("Date", &httpdate::fmt_http_date(SystemTime::now()));
    draft = match announce {
        None => draft.with("Content-Length", &length.to_string()),
        Some(Announce::Length(said)) => draft.with("Content-Length", &said.to_string()),
        Some(Announce::Chunked) => draft.with("Transfer-Encoding", "chunked"),
        Some(Announce::Nothing) => draft,
    };
    if says_close {
        draft = draft.with("Connection", "close");
    }
    draft = rule.headers.iter().fold(draft, |draft, (name, value)| draft.with(name, value));

    let head = written(&draft, rule);
    let bodiless = request.method == "HEAD" || matches!(draft.status, 100..=199 | 204 | 304);
    let extra = if rule.endless { u64::MAX } else { rule.extra };
    let body = if bodiless { Body::empty() } else { draft.body.followed_by(extra) };
    Answer { status: draft.status, head, body, chunked: chunked && !bodiless, close }
}

fn written(draft: &Draft, rule: &Rule) -> Vec<u8> {
    let hints = usize::try_from(rule.interim).unwrap_or(usize::MAX).min(1 << 20);
    let mut head = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(hints);
    head += &format!("HTTP/1.1 {} {}\r\n", draft.status, reason(draft.status));
    for (name, value) in &draft.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if rule.huge_header > 0 {
        let padding = usize::try_from(rule.huge_header.min(LONGEST_HEADER)).unwrap_or_default();
        head += &format!("X-Padding: {}\r\n", "a".repeat(padding));
    }
    head += "\r\n";
    head.into_bytes()
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        206 => "Partial Content",
        301 => "Moved Permanently",
        302 => "Found",
        303 => "See Other",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        407 => "Proxy Authentication Required",
        408 => "Request Timeout",
        413 => "Content Too Large",
        416 => "Range Not Satisfiable",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Status",
    }
}
