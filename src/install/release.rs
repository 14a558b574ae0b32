//! What can be installed: exact versions, channels, and the names that a release's files have.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The longest text that is looked at as a version.
const MOST_VERSION: usize = 40;

/// An exact version: `1.4.0` or `1.5.0-beta.2`. Nothing else is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Version {
    /// The line that a channel never leaves.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
    /// The number of the prerelease, if it is one.
    pub beta: Option<u32>,
}

/// Not a version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version (X.Y.Z or X.Y.Z-beta.N)")]
pub struct NotAVersion(String);

impl FromStr for Version {
    type Err = NotAVersion;

    fn from_str(text: &str) -> Result<Self, NotAVersion> {
        let refuse = || NotAVersion(text.chars().take(MOST_VERSION).collect());
        if text.len() > MOST_VERSION {
            return Err(refuse());
        }
        let (numbers, beta) = match text.split_once("-beta.") {
            Some((numbers, beta)) => (numbers, Some(number(beta).ok_or_else(refuse)?)),
            None => (text, None),
        };
        let mut parts = numbers.split('.').map(number);
        match (parts.next().flatten(), parts.next().flatten(), parts.next().flatten(), parts.next()) {
            (Some(major), Some(minor), Some(patch), None) => Ok(Self { major, minor, patch, beta }),
            _ => Err(refuse()),
        }
    }
}

/// A decimal number without sign or leading zeros.
fn number(text: &str) -> Option<u32> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

impl TryFrom<String> for Version {
    type Error = NotAVersion;
    fn try_from(text: String) -> Result<Self, NotAVersion> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)?;
        self.beta.map_or(Ok(()), |n| write!(f, "-beta.{n}"))
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |v: &Self| (v.major, v.minor, v.patch, v.beta.unwrap_or(u32::MAX), v.beta.is_none());
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A name that resolves once to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// Releases only, never a prerelease.
    Stable,
    /// Prereleases too.
    Beta,
}

/// Not a channel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a channel (stable or beta)")]
pub struct NotAChannel(String);

impl FromStr for Channel {
    type Err = NotAChannel;
    fn from_str(text: &str) -> Result<Self, NotAChannel> {
        match text {
            "stable" => Ok(Self::Stable),
            "beta" => Ok(Self::Beta),
            _ => Err(NotAChannel(text.chars().take(MOST_VERSION).collect())),
        }
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stable => "stable",
            Self::Beta => "beta",
        })
    }
}

/// What a channel pointer may not resolve to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PointerError {
    /// Not one line with a version.
    #[error("the pointer of channel {channel} holds {seen:?}, not one line with a version")]
    Grammar {
        /// The channel.
        channel: Channel,
        /// The start of what the pointer holds.
        seen: String,
    },
    /// A prerelease on the stable channel.
    #[error("channel stable points to {0}, a prerelease")]
    Prerelease(Version),
    /// Another major line.
    #[error("channel {channel} points to {found}, outside major line {major}")]
    Major {
        /// The channel.
        channel: Channel,
        /// What it points to.
        found: Version,
        /// The line that was asked for.
        major: u32,
    },
    /// Older than what is installed.
    #[error("channel {channel} points to {found}, older than the installed {installed}")]
    Older {
        /// The channel.
        channel: Channel,
        /// What it points to.
        found: Version,
        /// What is installed.
        installed: Version,
    },
}

/// Reads a channel pointer: one line, an optional `v`, white space around it tolerated; never below what is
/// installed nor across a major line, and `stable` never a prerelease.
///
/// # Errors
/// Names what the pointer holds instead.
pub fn read_pointer(
    channel: Channel,
    major: u32,
    installed: Option<Version>,
    pointer: &[u8],
) -> Result<Version, PointerError> {
    let text = String::from_utf8_lossy(pointer);
    let line = text.trim();
    let found: Version = line.strip_prefix('v').unwrap_or(line).parse().map_err(|NotAVersion(_)| {
        PointerError::Grammar { channel, seen: line.chars().take(MOST_VERSION).collect() }
    })?;
    may_select(channel, major, installed, found)
}

/// What a channel may select, wherever it was resolved: see [`read_pointer`].
///
/// # Errors
/// Names the rule that it breaks.
pub fn may_select(
    channel: Channel,
    major: u32,
    installed: Option<Version>,
    found: Version,
) -> Result<Version, PointerError> {
    if found.major != major {
        return Err(PointerError::Major { channel, found, major });
    }
    if channel == Channel::Stable && found.beta.is_some() {
        return Err(PointerError::Prerelease(found));
    }
    match installed {
        Some(installed) if found < installed => Err(PointerError::Older { channel, found, installed }),
        _ => Ok(found),
    }
}

/// The name of the archive that holds `ployzd` for an architecture (`amd64`, `arm64`).
pub fn archive_name(architecture: &str) -> String {
    format!("ployzd_linux_{architecture}.tar.gz")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn versions_are_exactly_their_grammar() {
        for good in ["0.0.0", "1.4.0", "10.20.30", "1.5.0-beta.2"] {
            assert_eq!(good.parse::<Version>().unwrap().to_string(), good);
        }
        let long = "1".repeat(200);
        for bad in [
            "",
            "1",
            "1.2",
            "1.2.3.4",
            "v1.2.3",
            "01.2.3",
            "1.2.3-rc.1",
            "1.2.3-beta",
            "1.2.3-beta.x",
            "1.2.3-beta.01",
            "1.2.-3",
            "1.2.+3",
            " 1.2.3",
            "1.2.3\n",
            "1.2.99999999999",
            "../1.2.3",
            "nightly",
            &long,
        ] {
            assert!(bad.parse::<Version>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn versions_are_ordered() {
        let order =
            ["0.9.9", "1.0.0-beta.1", "1.0.0-beta.2", "1.0.0-beta.10", "1.0.0", "1.0.1", "1.2.0", "2.0.0"];
        let parsed: Vec<Version> = order.iter().map(|v| v.parse().unwrap()).collect();
        assert!(parsed.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn pointers_are_judged() {
        let v = |text: &str| text.parse::<Version>().unwrap();
        let read = |channel, installed: Option<&str>, text: &str| {
            read_pointer(channel, 1, installed.map(v), text.as_bytes())
        };
        assert_eq!(read(Channel::Stable, None, "v1.4.0\n"), Ok(v("1.4.0")));
        assert_eq!(read(Channel::Stable, Some("1.4.0"), "  1.4.0 \r\n"), Ok(v("1.4.0")));
        assert_eq!(read(Channel::Beta, None, "1.5.0-beta.1"), Ok(v("1.5.0-beta.1")));
        assert!(matches!(read(Channel::Stable, None, "1.5.0-beta.1"), Err(PointerError::Prerelease(_))));
        assert!(matches!(read(Channel::Stable, None, "2.0.0"), Err(PointerError::Major { .. })));
        assert!(matches!(read(Channel::Stable, Some("1.4.1"), "1.4.0"), Err(PointerError::Older { .. })));
        for bad in ["", "<html>403</html>", "1.4.0\n1.5.0", "vv1.4.0", "nightly"] {
            assert!(matches!(read(Channel::Stable, None, bad), Err(PointerError::Grammar { .. })), "{bad:?}");
        }
    }
}
