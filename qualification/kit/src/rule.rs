//! One rule: for which requests, and what is done wrongly. The fields combine: a rule may delay *and* answer
//! 503, or drip *and* then reset.
//!
//! The same type is the builder of tests and the JSON of a rules file; durations there are milliseconds:
//!
//! ```json
//! [{"path": "/v1/stable", "times": 2, "status": 503, "headers": {"Retry-After": "1"}},
//!  {"path": "*.tar.gz", "drip": {"bytes": 1, "every_ms": 500}, "cut": {"after": 100, "how": "reset"}},
//!  {"accept": "hang", "times": 1}]
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What is answered wrongly, for which requests, and how often.
///
/// Rules are looked at in the order in which they were given; the first one that matches and is not used up
/// applies. With no rule left the answer is good.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// The path that the rule is for, with `*` for any run of characters. A pattern with a `?` is compared
    /// with path and query, any other with the path alone. Empty: every path.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Only requests with this method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// How many matching requests pass before the rule applies.
    #[serde(skip_serializing_if = "is_zero")]
    pub after: u64,
    /// To how many requests the rule applies; then it is used up. For ever, if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,

    /// Not for a request but for a connection: what happens to it before a byte was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<Accept>,
    /// Nothing is sent for this long after the request was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay_ms: Option<u64>,
    /// Another status. Below 300 the file is still what is sent; from 300 on, a small HTML page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Headers to add, or to replace; an empty value removes the header.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Another body than the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Sent instead of any HTTP, after which the connection is closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw: Option<String>,
    /// Redirects instead of answering; `status` chooses among 301, 302, 303, 307 and 308.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redirect: Option<Redirect>,
    /// How a `Range` request is answered wrongly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<RangeLie>,
    /// How many `103 Early Hints` are sent before the answer.
    #[serde(skip_serializing_if = "is_zero")]
    pub interim: u64,
    /// How many bytes of padding the head carries, in one header.
    #[serde(skip_serializing_if = "is_zero")]
    pub huge_header: u64,

    /// What is said of the body's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announce: Option<Announce>,
    /// The byte at this offset of the file is another one (in a range too).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flip: Option<u64>,
    /// How many bytes follow after the body.
    #[serde(skip_serializing_if = "is_zero")]
    pub extra: u64,
    /// Zeros follow after the body, without end; no length is announced unless `announce` says one.
    #[serde(skip_serializing_if = "is_false")]
    pub endless: bool,
    /// Few bytes at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drip: Option<Drip>,
    /// The body stops too early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// The connection is closed after a good answer.
    #[serde(skip_serializing_if = "is_false")]
    pub close: bool,
}

/// What happens to a connection that was accepted, before anything is read from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accept {
    /// Nothing: no handshake, no byte, until the peer goes away.
    Hang,
    /// Closed at once.
    Close,
    /// Reset at once.
    Reset,
    /// Bytes that are neither TLS nor HTTP, then closed.
    Garbage,
}

/// Where a redirect leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Redirect {
    /// To this URL.
    To(String),
    /// To the same URL again.
    Loop,
    /// This many redirects (`?hop=1`, `?hop=2`, …), then the good answer. Each hop uses up one of `times`.
    Chain(u32),
}

/// How a `Range` request is answered wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RangeLie {
    /// 200 and the whole file.
    Ignore,
    /// 206, honestly labelled, but starting at another byte than was asked for.
    Shifted,
    /// 206 labelled as what was asked for, with the bytes from the start of the file.
    Mislabelled,
    /// 206 whatever `If-Range` says, and each answer has another `ETag`.
    ChangedEtag,
    /// Each answer has another `ETag` and `If-Range` is honoured: the file seems to be replaced all the time.
    Replaced,
    /// 416.
    Refuse,
}

/// What is said of the body's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Announce {
    /// Nothing: the body ends when the connection does.
    Nothing,
    /// Chunked transfer coding.
    Chunked,
    /// This `Content-Length`; the body is what it is.
    Length(u64),
}

/// Few bytes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drip {
    /// How many bytes at a time.
    pub bytes: usize,
    /// How long between them.
    pub every_ms: u64,
    /// The head drips too.
    #[serde(default)]
    pub head: bool,
}

/// The body stops after so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// After how many bytes of this answer's body.
    pub after: u64,
    /// What happens then.
    pub how: How,
}

/// How an answer stops too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The connection stays open and nothing more comes.
    Stall,
    /// The connection is closed in good order: `close_notify`, then FIN.
    Close,
    /// FIN without `close_notify`.
    Abrupt,
    /// RST.
    Reset,
}

impl Rule {
    /// A rule for a path (exact, or with `*`) that does nothing yet.
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }
    /// A rule for connections.
    #[must_use]
    pub fn at_accept(accept: Accept) -> Self {
        Self { accept: Some(accept), ..Self::default() }
    }
    /// Only requests with this method.
    #[must_use]
    pub fn method(self, method: impl Into<String>) -> Self {
        Self { method: Some(method.into()), ..self }
    }
    /// Applies to so many requests, then no longer.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        Self { times: Some(times), ..self }
    }
    /// Lets so many matching requests pass first.
    #[must_use]
    pub fn after(self, after: u64) -> Self {
        Self { after, ..self }
    }
    /// Nothing is sent for this long after the request was read.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay_ms: Some(millis(delay)), ..self }
    }
    /// Another status.
    #[must_use]
    pub fn status(self, status: u16) -> Self {
        Self { status: Some(status), ..self }
    }
    /// A header to add or to replace; an empty value removes it.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }
    /// Another body than the file.
    #[must_use]
    pub fn body(self, body: impl Into<String>) -> Self {
        Self { body: Some(body.into()), ..self }
    }
    /// Sent instead of any HTTP, then closed.
    #[must_use]
    pub fn raw(self, raw: impl Into<String>) -> Self {
        Self { raw: Some(raw.into()), ..self }
    }
    /// Garbage instead of HTTP.
    #[must_use]
    pub fn garbage(self) -> Self {
        self.raw("\u{1}\u{2}\u{ff} this is not HTTP\r\n\u{0}\u{0}\r\n\r\n")
    }
    /// A redirect to a URL.
    #[must_use]
    pub fn redirect(self, url: impl Into<String>) -> Self {
        Self { redirect: Some(Redirect::To(url.into())), ..self }
    }
    /// A redirect to the same URL.
    #[must_use]
    pub fn redirect_loop(self) -> Self {
        Self { redirect: Some(Redirect::Loop), ..self }
    }
    /// So many redirects, then the good answer.
    #[must_use]
    pub fn redirect_chain(self, hops: u32) -> Self {
        Self { redirect: Some(Redirect::Chain(hops)), ..self }
    }
    /// A wrong answer to `Range`.
    #[must_use]
    pub fn range(self, lie: RangeLie) -> Self {
        Self { range: Some(lie), ..self }
    }
    /// So many `103 Early Hints` first.
    #[must_use]
    pub fn interim(self, count: u64) -> Self {
        Self { interim: count, ..self }
    }
    /// A header of so many bytes.
    #[must_use]
    pub fn huge_header(self, bytes: u64) -> Self {
        Self { huge_header: bytes, ..self }
    }
    /// Claims that the body is compressed, which it is not.
    #[must_use]
    pub fn gzip_lie(self) -> Self {
        self.header("Content-Encoding", "gzip")
    }
    /// What is said of the body's length.
    #[must_use]
    pub fn announce(self, announce: Announce) -> Self {
        Self { announce: Some(announce), ..self }
    }
    /// A wrong byte at this offset.
    #[must_use]
    pub fn flip(self, offset: u64) -> Self {
        Self { flip: Some(offset), ..self }
    }
    /// More bytes than were announced.
    #[must_use]
    pub fn extra(self, bytes: u64) -> Self {
        Self { extra: bytes, ..self }
    }
    /// A body without end, and without a length unless one is announced.
    #[must_use]
    pub fn endless(self) -> Self {
        Self { endless: true, ..self }
    }
    /// So many bytes of the body at a time.
    #[must_use]
    pub fn drip(self, bytes: usize, every: Duration) -> Self {
        Self { drip: Some(Drip { bytes, every_ms: millis(every), head: false }), ..self }
    }
    /// So many bytes at a time, of the head too.
    #[must_use]
    pub fn drip_head(self, bytes: usize, every: Duration) -> Self {
        Self { drip: Some(Drip { bytes, every_ms: millis(every), head: true }), ..self }
    }
    /// The body stops after so many bytes.
    #[must_use]
    pub fn cut(self, after: u64, how: How) -> Self {
        Self { cut: Some(Cut { after, how }), ..self }
    }
    /// The connection is closed after a good answer.
    #[must_use]
    pub fn close(self) -> Self {
        Self { close: true, ..self }
    }

    /// Whether the rule is for this request.
    pub(crate) fn matches(&self, method: &str, path: &str, query: Option<&str>) -> bool {
        if self.accept.is_some() || self.method.as_deref().is_some_and(|only| only != method) {
            return false;
        }
        match query {
            _ if self.path.is_empty() => true,
            Some(query) if self.path.contains('?') => glob(&self.path, &format!("{path}?{query}")),
            _ => glob(&self.path, path),
        }
    }
}

/// Whether `text` is what `pattern` says, in which `*` stands for any run of characters.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(start) else { return false };
    (0..=text.len()).filter(|at| text.is_char_boundary(*at)).any(|at| glob(rest, &text[at..]))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !*value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, path, query, fits) in [
            ("/v1/stable", "/v1/stable", None, true),
            ("/v1/stable", "/v1/stable", Some("a=1"), true),
            ("/v1/stable", "/v1/stable2", None, false),
            ("*.tar.gz", "/a/b.tar.gz", None, true),
            ("/releases/*/checksums.txt", "/releases/download/v1.4.0/checksums.txt", None, true),
            ("/releases/*/checksums.txt", "/releases/checksums.txt", None, false),
            ("*", "/", None, true),
            ("", "/", None, true),
            ("/a?hop=*", "/a", Some("hop=2"), true),
            ("/a?hop=*", "/a", None, false),
        ] {
            assert_eq!(Rule::new(pattern).matches("GET", path, query), fits, "{pattern} {path} {query:?}");
        }
        assert!(!Rule::new("*").method("GET").matches("HEAD", "/", None));
        assert!(!Rule::at_accept(Accept::Hang).matches("GET", "/", None));
    }

    #[test]
    fn json_and_builder_are_the_same() {
        let json = r#"[{"path":"/v1/stable","times":2,"status":503,"headers":{"Retry-After":"1"}},
            {"path":"*","drip":{"bytes":1,"every_ms":500},"cut":{"after":9,"how":"reset"},"announce":{"length":5}},
            {"path":"/r","redirect":{"to":"http://x/"}},{"path":"/l","redirect":"loop"},{"accept":"hang"}]"#;
        let built = vec![
            Rule::new("/v1/stable").times(2).status(503).header("Retry-After", "1"),
            Rule::new("*")
                .drip(1, Duration::from_millis(500))
                .cut(9, How::Reset)
                .announce(Announce::Length(5)),
            Rule::new("/r").redirect("http://x/"),
            Rule::new("/l").redirect_loop(),
            Rule::at_accept(Accept::Hang),
        ];
        assert_eq!(serde_json::from_str::<Vec<Rule>>(json).unwrap(), built);
        let back = serde_json::to_string(&built).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Rule>>(&back).unwrap(), built);
        assert!(serde_json::from_str::<Rule>(r#"{"path":"/","statuss":1}"#).is_err());
    }
}
