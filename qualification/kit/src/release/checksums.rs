//! `checksums.txt` in the form of sha256sum, and in the forms that must be refused.

use ring::digest::{SHA256, digest};

/// How long the long one is.
const LONG: usize = 10 << 20;

/// What `checksums.txt` is like. What is said of a line is said of each file's line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksums {
    /// One right line for each file.
    #[default]
    Good,
    /// There is no such file.
    Absent,
    /// It is there and empty.
    Empty,
    /// It has a line, but for another file.
    Missing,
    /// The right line, twice.
    Twice,
    /// The right line, and another one for the same name.
    Contradicting,
    /// The digest of other bytes.
    Wrong,
    /// The digest in upper case.
    UpperCase,
    /// `*` before the name, as sha256sum marks binary mode.
    Star,
    /// Lines end as in DOS.
    Crlf,
    /// The right digest, but the name goes on: `NAME.sig`.
    LongerName,
    /// The right digest, but the name has a directory before it: `dist/NAME`.
    NameInDirectory,
    /// 63 digits.
    TooShort,
    /// 65 digits.
    TooLong,
    /// 64 characters that are not all digits.
    NotHex,
    /// A digest of another kind, as BSD writes it.
    Bsd,
    /// Begins with a byte order mark.
    Bom,
    /// The last line has no end.
    WithoutNewline,
    /// The right lines, behind ten mebibytes of others.
    Huge,
    /// A page that says that something went wrong.
    Html,
}

/// The digest, in lower case.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Checksums {
    /// The file's bytes; none if there is no file.
    #[must_use]
    pub fn text(self, digests: &[(&str, String)]) -> Option<Vec<u8>> {
        let lines = |line: fn(&str, &str) -> String| -> String {
            digests.iter().map(|(name, digest)| line(name, digest)).collect()
        };
        let good = |name: &str, digest: &str| format!("{digest}  {name}\n");
        let other = sha256(b"other bytes");
        let text = match self {
            Self::Good => lines(good),
            Self::Absent => return None,
            Self::Empty => String::new(),
            Self::Missing => format!("{other}  another_file.tar.gz\n"),
            Self::Twice => lines(good) + &lines(good),
            Self::Contradicting => lines(good) + &lines(|name, _| format!("{}  {name}\n", sha256(b"other"))),
            Self::Wrong => lines(|name, _| format!("{}  {name}\n", sha256(b"other"))),
            Self::UpperCase => lines(|name, digest| format!("{}  {name}\n", digest.to_uppercase())),
            Self::Star => lines(|name, digest| format!("{digest} *{name}\n")),
            Self::Crlf => lines(|name, digest| format!("{digest}  {name}\r\n")),
            Self::LongerName => lines(|name, digest| format!("{digest}  {name}.sig\n")),
            Self::NameInDirectory => lines(|name, digest| format!("{digest}  dist/{name}\n")),
            Self::TooShort => lines(|name, digest| format!("{}  {name}\n", &digest[1..])),
            Self::TooLong => lines(|name, digest| format!("0{digest}  {name}\n")),
            Self::NotHex => lines(|name, digest| format!("g{}  {name}\n", &digest[1..])),
            Self::Bsd => lines(|name, digest| format!("SHA256 ({name}) = {digest}\n")),
            Self::Bom => format!("\u{feff}{}", lines(good)),
            Self::WithoutNewline => lines(good).trim_end().to_owned(),
            Self::Huge => {
                let filler = format!("{other}  filler.tar.gz\n");
                filler.repeat(LONG / filler.len()) + &lines(good)
            }
            Self::Html => "<!DOCTYPE html>\n<html><body>Something went wrong</body></html>\n".to_owned(),
        };
        Some(text.into_bytes())
    }
}
