//! Volumes over a restart of their plugin: the new one answers, and what was mounted and is used is mounted still.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::ANSWER;
use crate::host::Host;
use crate::text::printable;

/// Who answers at the plugin's socket.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Plugin {
    /// Its version.
    pub(super) version: String,
    /// Its process.
    pub(super) pid: u32,
}

#[derive(Deserialize)]
struct Activated {
    #[serde(rename = "Implements")]
    implements: Vec<String>,
    /// What it says beside what Docker reads; other releases may say something else.
    #[serde(rename = "Ployz", default)]
    ployz: Option<serde_json::Value>,
}

/// Asks the plugin who it is; none when it does not say, and serves volumes all the same.
pub(super) fn ask(host: &Host) -> Result<Option<Plugin>, String> {
    let body = serde_json::json!({});
    let asked = crate::http::ask_blocking(
        &host.volume_plugin(),
        hyper::Method::POST,
        "/Plugin.Activate",
        Some(&body),
        ANSWER,
    );
    let (status, body) = asked.map_err(|e| e.to_string())?;
    if status != 200 {
        return Err(format!("the volume plugin answered {status}"));
    }
    let answer: Activated = serde_json::from_slice(&body)
        .map_err(|e| format!("the volume plugin's answer is not understood: {e}"))?;
    if !answer.implements.iter().any(|what| what == "VolumeDriver") {
        return Err("what answers at the volume plugin's socket is no volume plugin".into());
    }
    let plugin = answer.ployz.and_then(|said| serde_json::from_value::<Plugin>(said).ok());
    Ok(plugin.map(|plugin| Plugin { version: printable(&plugin.version), ..plugin }))
}

/// Volumes that are mounted now: names and what they are.
pub(crate) fn mounted(host: &Host) -> Vec<(String, String)> {
    let first = if host.privileged() { "/proc/1/mountinfo" } else { "/proc/self/mountinfo" };
    let text = fs::read_to_string(first).unwrap_or_default();
    let volumes = host.volumes();
    text.lines().filter_map(|line| volume(&volumes, line)).collect()
}

fn volume(volumes: &Path, line: &str) -> Option<(String, String)> {
    let (front, back) = line.split_once(" - ")?;
    let point = PathBuf::from(front.split(' ').nth(4)?);
    // A volume's name has nothing that mountinfo would write otherwise.
    let name =
        point.strip_prefix(volumes).ok()?.to_str().filter(|name| !name.is_empty() && !name.contains('/'))?;
    Some((name.to_owned(), back.split(' ').nth(1)?.to_owned()))
}

/// Those that were mounted before, are used by somebody, and are not what is mounted now.
pub(super) fn lost(host: &Host, before: &[(String, String)]) -> Vec<String> {
    if before.is_empty() {
        return Vec::new();
    }
    let now = mounted(host);
    let used = |name: &str| {
        let mut users = fs::read_dir(host.volume_users().join(name)).into_iter().flatten();
        users.next().is_some()
    };
    let gone = before.iter().filter(|volume| !now.contains(volume) && used(&volume.0));
    gone.map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_below_the_volumes_is_one() {
        let volumes = Path::new("/var/lib/ployz-volumes");
        let line =
            |point: &str| format!("36 35 0:42 / {point} rw,noatime shared:5 - zfs ployz/volumes/data rw");
        let found = volume(volumes, &line("/var/lib/ployz-volumes/data"));
        assert_eq!(found, Some(("data".into(), "ployz/volumes/data".into())));
        for other in ["/var/lib/ployz-volumes", "/var/lib/ployz-volumes/a/b", "/var/lib/docker"] {
            assert_eq!(volume(volumes, &line(other)), None, "{other}");
        }
    }
}
