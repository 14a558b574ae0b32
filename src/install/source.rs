//! Where releases come from and how long each step may take: `/etc/ployz/install.json`, which only root writes.
//! No request chooses a source, and the proxy variables of the environment are not used.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::release::{Channel, Version, archive_name};
use crate::durable::read_bounded;
use crate::host::Host;

const RELEASES: &str = "https://github.com/getployz/ployz/releases/download";
const CHANNELS: &str = "https://ployz.sh";
const SCHEMA: u32 = 1;
const MOST_SETTINGS: usize = 64 * 1024;
const MOST_CA: usize = 1024 * 1024;

/// Root's settings, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Releases are at `<releases>/v<version>/<file>`.
    pub releases: String,
    /// Pointers are at `<channels>/v<major>/<channel>`.
    pub channels: String,
    /// PEM certificates that are trusted besides the system's.
    pub ca: Option<Vec<u8>>,
    /// The proxy for every download.
    pub proxy: Option<String>,
    /// When set, `checksums.txt` must be signed by it (minisign).
    pub signing_key: Option<minisign_verify::PublicKey>,
    /// Whether `http:` is allowed: for a mirror on a trusted network.
    pub allow_http: bool,
    /// The oldest version that is accepted; none by default.
    pub floor: Option<Version>,
    /// How long each step may take.
    pub deadlines: Deadlines,
    /// Whether there is a settings file at all.
    pub configured: bool,
}

/// How long each step may take.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// A pointer or `checksums.txt`.
    pub pointer: Duration,
    /// Without a byte.
    pub stall: Duration,
    /// The archive, all retries included.
    pub acquire: Duration,
    /// One run of the staged binary.
    pub preflight: Duration,
    /// One call of systemctl.
    pub systemctl: Duration,
    /// From the restart to readiness.
    pub confirm: Duration,
    /// For how long readiness must hold.
    pub window: Duration,
    /// One run of a package manager or account tool.
    pub packages: Duration,
}

/// Why the settings can't be used. The daemon starts all the same.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// It can't be read.
    #[error("reading {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A field is unknown or has a value that it can't have.
    #[error("{path:?}: {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The field and what is wrong with it.
        problem: String,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: Option<u32>,
    releases: Option<String>,
    channels: Option<String>,
    ca_file: Option<PathBuf>,
    proxy: Option<String>,
    signing_key: Option<String>,
    #[serde(default)]
    allow_http: bool,
    #[serde(default)]
    deadlines: BTreeMap<String, u64>,
    confirm_window: Option<u64>,
    floor: Option<Version>,
}

impl Settings {
    /// What counts where nothing is set.
    pub(crate) fn defaults() -> Result<Self, String> {
        Self::check(File::default(), false)
    }

    /// Reads root's settings; a file that is not there means the published source and the deadlines of the manual.
    ///
    /// # Errors
    /// Names the file, the field and the fault.
    pub fn read(host: &Host) -> Result<Self, SettingsError> {
        let path = host.settings();
        let (file, configured) = match read_bounded(&path, MOST_SETTINGS) {
            Ok(text) => {
                let file = serde_json::from_slice(&text)
                    .map_err(|e| SettingsError::Invalid { path: path.clone(), problem: e.to_string() })?;
                (file, true)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => (File::default(), false),
            Err(source) => return Err(SettingsError::Read { path, source }),
        };
        Self::check(file, configured).map_err(|problem| SettingsError::Invalid { path, problem })
    }

    fn check(file: File, configured: bool) -> Result<Self, String> {
        if let Some(schema) = file.schema.filter(|s| *s != SCHEMA) {
            return Err(format!("schema {schema} is not known to this release (it knows {SCHEMA})"));
        }
        let signing_key =
            file.signing_key.as_deref().map(minisign_verify::PublicKey::from_base64).transpose();
        let signing_key =
            signing_key.map_err(|e| format!("signing_key is not a minisign public key: {e}"))?;
        let ca = match &file.ca_file {
            Some(path) => {
                Some(read_bounded(path, MOST_CA).map_err(|e| format!("ca_file: reading {path:?}: {e}"))?)
            }
            None => None,
        };
        let settings = Self {
            releases: base("releases", file.releases.as_deref().unwrap_or(RELEASES), file.allow_http)?,
            channels: base("channels", file.channels.as_deref().unwrap_or(CHANNELS), file.allow_http)?,
            ca,
            proxy: file.proxy.as_deref().map(|p| base("proxy", p, true)).transpose()?,
            signing_key,
            allow_http: file.allow_http,
            floor: file.floor,
            deadlines: Deadlines::check(file.deadlines, file.confirm_window)?,
            configured,
        };
        Ok(settings)
    }

    /// The URL of a channel's pointer.
    pub fn pointer_url(&self, major: u32, channel: Channel) -> String {
        format!("{}/v{major}/{channel}", self.channels)
    }

    /// The URL of a release's `checksums.txt`.
    pub fn checksums_url(&self, version: Version) -> String {
        format!("{}/v{version}/checksums.txt", self.releases)
    }

    /// The URL of the signature of a release's `checksums.txt`.
    pub fn signature_url(&self, version: Version) -> String {
        format!("{}.minisig", self.checksums_url(version))
    }

    /// The URL of a release's archive for an architecture.
    pub fn archive_url(&self, version: Version, architecture: &str) -> String {
        format!("{}/v{version}/{}", self.releases, archive_name(architecture))
    }
}

/// An `https:` URL without user (but for a proxy), query or fragment, and without a slash at its end.
fn base(field: &str, text: &str, http: bool) -> Result<String, String> {
    let url = reqwest::Url::parse(text).map_err(|e| format!("{field}: {text:?} is not a URL: {e}"))?;
    match url.scheme() {
        "https" => {}
        "http" if http => {}
        "http" => return Err(format!("{field}: {text:?} is not https (allow_http permits it)")),
        _ => return Err(format!("{field}: {text:?} is not an https URL")),
    }
    if field != "proxy" && (!url.username().is_empty() || url.password().is_some()) {
        return Err(format!("{field}: a URL with a user or password would be shown in records and logs"));
    }
    if url.query().is_some() || url.fragment().is_some() || url.host_str().is_none() {
        return Err(format!("{field}: {text:?} must be a plain URL, without query or fragment"));
    }
    // As it was understood: white space and odd spellings of the text are no part of what is built from it.
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

impl Deadlines {
    const DEFAULT: Self = Self {
        pointer: Duration::from_secs(30),
        stall: Duration::from_secs(30),
        acquire: Duration::from_secs(300),
        preflight: Duration::from_secs(10),
        systemctl: Duration::from_secs(30),
        confirm: Duration::from_secs(60),
        window: Duration::from_secs(8),
        packages: Duration::from_secs(1200),
    };

    fn check(given: BTreeMap<String, u64>, window: Option<u64>) -> Result<Self, String> {
        let mut deadlines = Self::DEFAULT;
        for (name, seconds) in given {
            let deadline = match name.as_str() {
                "pointer" => &mut deadlines.pointer,
                "stall" => &mut deadlines.stall,
                "acquire" => &mut deadlines.acquire,
                "preflight" => &mut deadlines.preflight,
                "systemctl" => &mut deadlines.systemctl,
                "confirm" => &mut deadlines.confirm,
                "packages" => &mut deadlines.packages,
                _ => return Err(format!("deadlines: unknown field {name:?}")),
            };
            if !(1..=3600).contains(&seconds) {
                return Err(format!("deadlines: {name} is {seconds} s, not between 1 and 3600"));
            }
            *deadline = Duration::from_secs(seconds);
        }
        if let Some(seconds) = window {
            if seconds > 120 {
                return Err(format!("confirm_window is {seconds} s, more than 120"));
            }
            deadlines.window = Duration::from_secs(seconds);
        }
        Ok(deadlines)
    }

    /// Shortens them in proportion, where the stages of an upgrade could take more than `most` together. Returns what is
    /// worth telling.
    pub(crate) fn fit(&mut self, most: Duration) -> Option<String> {
        let stages = [
            (&mut self.pointer, 2),
            (&mut self.acquire, 1),
            (&mut self.preflight, 3),
            (&mut self.systemctl, 10),
            (&mut self.confirm, 1),
            (&mut self.window, 1),
        ];
        let total: Duration = stages.iter().map(|(deadline, times)| **deadline * *times).sum();
        if total <= most {
            return None;
        }
        for (deadline, _) in stages {
            *deadline = deadline.mul_f64(most.as_secs_f64() / total.as_secs_f64());
        }
        let (total, most) = (total.as_secs(), most.as_secs());
        Some(format!(
            "the deadlines in install.json add up to {total} s, and an upgrade has {most} s: all were shortened in \
             proportion"
        ))
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(text: &str) -> Result<Settings, String> {
        let file: File = serde_json::from_str(text).map_err(|e| e.to_string())?;
        Settings::check(file, true)
    }

    #[test]
    fn deadlines_fit_into_what_an_upgrade_has() {
        let most = Duration::from_secs(840);
        let mut deadlines = Deadlines::DEFAULT;
        assert_eq!(deadlines.fit(most), None, "those of the manual fit");
        deadlines.acquire = Duration::from_secs(3600);
        let said = deadlines.fit(most).unwrap();
        assert!(said.contains("840 s"), "{said}");
        assert!(deadlines.acquire < most && deadlines.confirm >= Duration::from_secs(10), "{deadlines:?}");
        assert_eq!(deadlines.fit(most + Duration::from_secs(1)), None);
    }

    #[test]
    fn settings_name_the_field_that_is_wrong() {
        for (text, named) in [
            (r#"{"release":"https://x"}"#, "unknown field `release`"),
            (r#"{"schema":2}"#, "schema 2"),
            (r#"{"releases":"http://mirror"}"#, "releases"),
            (r#"{"releases":"file:///etc"}"#, "releases"),
            (r#"{"channels":"https://mirror/?a=b"}"#, "channels"),
            (r#"{"deadlines":{"confrim":3}}"#, "confrim"),
            (r#"{"deadlines":{"confirm":0}}"#, "confirm"),
            (r#"{"confirm_window":600}"#, "confirm_window"),
            (r#"{"floor":"1.x"}"#, "not a version"),
            (r#"{"ca_file":"/nonexistent/ca.pem"}"#, "ca_file"),
            (r#"{"signing_key":"RWQ"}"#, "signing_key"),
            ("[]", "invalid"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn settings_make_urls() {
        let settings = read(r#"{"schema":1,"releases":"https://mirror/r/","confirm_window":2}"#).unwrap();
        let version = "1.4.0".parse().unwrap();
        assert_eq!(
            settings.archive_url(version, "arm64"),
            "https://mirror/r/v1.4.0/ployzd_linux_arm64.tar.gz"
        );
        assert_eq!(settings.pointer_url(1, Channel::Stable), "https://ployz.sh/v1/stable");
        assert_eq!(settings.deadlines.window, Duration::from_secs(2));
        assert!(read(r#"{"releases":"http://mirror","allow_http":true}"#).is_ok());
        assert_eq!(read(r#"{"releases":" HTTPS://Mirror/r \n"}"#).unwrap().releases, "https://mirror/r");
    }
}
