//! Docker's volume plugin protocol, version 1: what is asked, and what each request comes to.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{directory, using, zfs};
use crate::host::Host;
use crate::storage::{self, Backend};

/// The longest name of a volume, in bytes: a dataset's name has at most 255 with its pool's.
const LONGEST_NAME: usize = 200;
/// The longest id of a mount, in bytes.
const LONGEST_ID: usize = 128;

/// A volume, as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Volume {
    pub(super) name: String,
    /// Where it is mounted, if it is.
    pub(super) mountpoint: Option<PathBuf>,
    /// Its limit in bytes, if it has one.
    pub(super) size: Option<u64>,
    /// When it was made, in seconds since 1970.
    pub(super) created: i64,
    pub(super) backend: &'static str,
}

/// Why a request was not done.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It is so, and is said.
    No(String),
    /// It can't be told now.
    Unknown(String),
}

/// A request that gets no answer: any answer would be taken for a denial.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unanswerable(pub(super) String);

/// One request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Activate,
    Capabilities,
    Create {
        name: String,
        size: Option<u64>,
    },
    Remove {
        name: String,
    },
    Mount {
        name: String,
        id: String,
    },
    Unmount {
        name: String,
        id: String,
    },
    Path {
        name: String,
    },
    Get {
        name: String,
    },
    List,
    /// Something that is no name, id or option: said to whoever asked.
    Wrong(String),
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Body {
    name: String,
    #[serde(rename = "ID")]
    id: String,
    opts: Option<Map<String, Value>>,
}

impl Asked {
    /// Reads a request; none for a path that is not served.
    pub(super) fn read(path: &str, body: &[u8]) -> Result<Option<Self>, String> {
        let Some(verb) = path.strip_prefix("/VolumeDriver.") else {
            return Ok((path == super::ABOUT).then_some(Self::Activate));
        };
        if !matches!(
            verb,
            "Capabilities" | "List" | "Create" | "Remove" | "Mount" | "Unmount" | "Path" | "Get"
        ) {
            return Ok(None);
        }
        if matches!(verb, "Capabilities" | "List") {
            return Ok(Some(if verb == "List" { Self::List } else { Self::Capabilities }));
        }
        let body: Body =
            serde_json::from_slice(body).map_err(|e| format!("the request is not understood: {e}"))?;
        let Body { name, id, opts } = body;
        if !is_name(&name) {
            let shown: String = name.chars().take(80).collect();
            return Ok(Some(Self::Wrong(format!(
                "{shown:?} is no name of a volume: letters, digits, '_', '.' and '-', the first a letter or digit, at \
                 most {LONGEST_NAME}"
            ))));
        }
        if matches!(verb, "Mount" | "Unmount") && !is_id(&id) {
            return Ok(Some(Self::Wrong("the id of the mount is none".into())));
        }
        Ok(Some(match verb {
            "Create" => match size(opts.unwrap_or_default()) {
                Ok(size) => Self::Create { name, size },
                Err(why) => Self::Wrong(why),
            },
            "Remove" => Self::Remove { name },
            "Mount" => Self::Mount { name, id },
            "Unmount" => Self::Unmount { name, id },
            "Path" => Self::Path { name },
            _ => Self::Get { name },
        }))
    }

    /// The volume that it is about.
    pub(super) fn volume(&self) -> Option<&str> {
        match self {
            Self::Create { name, .. }
            | Self::Remove { name }
            | Self::Mount { name, .. }
            | Self::Unmount { name, .. }
            | Self::Path { name }
            | Self::Get { name } => Some(name),
            Self::Activate | Self::Capabilities | Self::List | Self::Wrong(_) => None,
        }
    }

    /// Does it.
    ///
    /// # Errors
    /// When a look can't tell: it must not be answered.
    pub(super) fn carry_out(self, host: &Host, version: &str) -> Result<Value, Unanswerable> {
        let said = match &self {
            // Beside what Docker reads, who it is: an installer looks whether it is the one that it started.
            Self::Activate => Ok(json!({
                "Implements": ["VolumeDriver"], "Ployz": {"version": version, "pid": std::process::id()},
            })),
            Self::Capabilities => Ok(json!({"Capabilities": {"Scope": "local"}})),
            Self::Wrong(why) => Err(Trouble::No(why.clone())),
            Self::Create { name, size } => create(host, name, *size).map(|()| json!({"Err": ""})),
            Self::Remove { name } => remove(host, name).map(|()| json!({"Err": ""})),
            Self::Mount { name, id } => {
                mount(host, name, id).map(|path| json!({"Mountpoint": path, "Err": ""}))
            }
            Self::Unmount { name, id } => unmount(host, name, id).map(|()| json!({"Err": ""})),
            Self::Path { name } => {
                get(host, name).map(|volume| json!({"Mountpoint": mountpoint(&volume), "Err": ""}))
            }
            Self::Get { name } => get(host, name).map(|volume| json!({"Volume": shown(&volume), "Err": ""})),
            Self::List => all(host).map(|volumes| {
                let volumes: Vec<Value> = volumes.iter().map(shown).collect();
                json!({"Volumes": volumes, "Err": ""})
            }),
        };
        match said {
            Ok(answer) => Ok(answer),
            Err(Trouble::No(why)) => Ok(json!({ "Err": why })),
            // What changes something is not denied by a failure: Docker shows it to whoever asked.
            Err(Trouble::Unknown(why)) => match self {
                Self::Create { .. } | Self::Remove { .. } | Self::Mount { .. } => Ok(json!({ "Err": why })),
                _ => Err(Unanswerable(why)),
            },
        }
    }
}

/// Whether this may be the name of a volume.
pub(super) fn is_name(name: &str) -> bool {
    name.len() <= LONGEST_NAME
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

/// Whether this may be the id of a mount: it becomes a file's name.
pub(super) fn is_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= LONGEST_ID
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
}

fn size(options: Map<String, Value>) -> Result<Option<u64>, String> {
    let mut size = None;
    for (name, value) in options {
        let text = value.as_str().unwrap_or_default();
        match (name.as_str(), storage::size(text)) {
            ("size", Some(bytes)) => size = Some(bytes),
            ("size", None) => {
                return Err(format!("size {text:?} is none: a number with b, k, m, g or t, such as 10g"));
            }
            _ => return Err(format!("option {name:?} is not known: there is only size")),
        }
    }
    Ok(size)
}

fn backend(host: &Host) -> Result<Backend, Trouble> {
    storage::read(host).map_err(Trouble::Unknown)
}

/// Makes a volume; one that is there already is one, when it is what was asked for.
fn create(host: &Host, name: &str, size: Option<u64>) -> Result<(), Trouble> {
    let there = match backend(host)? {
        Backend::Zfs(pool) => match zfs::find(&pool, name)? {
            None if directory::find(host, name)?.is_none() => return zfs::create(host, &pool, name, size),
            found => found.or(directory::find(host, name)?),
        },
        Backend::Directory => directory::find(host, name)?,
    };
    match there {
        Some(volume) if volume.size == size => Ok(()),
        Some(volume) => {
            let is = volume.size.map_or_else(|| "no size".to_owned(), storage::shown_size);
            Err(Trouble::No(format!(
                "volume {name} is there already, with {is}: remove it first, or leave the size out"
            )))
        }
        None if size.is_some() => Err(Trouble::No(
            "a size needs storage that can keep to it: sudo /usr/local/bin/ployzd install --storage zfs"
                .into(),
        )),
        None => directory::create(host, name),
    }
}

/// What there is of a volume; an answered error when it is certain that there is none.
fn get(host: &Host, name: &str) -> Result<Volume, Trouble> {
    look(host, name)?.ok_or_else(|| Trouble::No(format!("there is no volume {name}")))
}

fn look(host: &Host, name: &str) -> Result<Option<Volume>, Trouble> {
    if let Some(volume) = directory::find(host, name)? {
        return Ok(Some(volume));
    }
    match backend(host)? {
        Backend::Zfs(pool) => Ok(zfs::find(&pool, name)?.map(|volume| zfs::mounted(host, &pool, volume))),
        Backend::Directory => Ok(None),
    }
}

fn all(host: &Host) -> Result<Vec<Volume>, Trouble> {
    let mut volumes = directory::all(host)?;
    if let Backend::Zfs(pool) = backend(host)? {
        volumes.extend(zfs::all(&pool)?.into_iter().map(|volume| zfs::mounted(host, &pool, volume)));
    }
    Ok(volumes)
}

fn mount(host: &Host, name: &str, id: &str) -> Result<PathBuf, Trouble> {
    let volume = get(host, name)?;
    // Noted before, so that nobody unmounts it in between.
    using::note(host, name, id)
        .map_err(|e| Trouble::Unknown(format!("noting who uses volume {name}: {e}")))?;
    let mounted = match (volume.backend, backend(host)?) {
        ("zfs", Backend::Zfs(pool)) => zfs::mount(host, &pool, name),
        _ => {
            volume.mountpoint.ok_or_else(|| Trouble::Unknown(format!("volume {name} is not there any more")))
        }
    };
    if mounted.is_err() {
        using::forget(host, name, id);
    }
    mounted
}

/// The last one that goes takes the mount with it, as far as the kernel lets it go: what is in use stays mounted.
fn unmount(host: &Host, name: &str, id: &str) -> Result<(), Trouble> {
    using::forget(host, name, id);
    match backend(host)? {
        Backend::Zfs(pool) if using::is_unused(host, name) => {
            if let Err(why) = zfs::unmount(host, &pool, name) {
                tracing::info!("volume {name} stays mounted: {why}");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn remove(host: &Host, name: &str) -> Result<(), Trouble> {
    let volume = match look(host, name)? {
        Some(volume) => volume,
        // Removed by the same request, whose answer was lost.
        None => return Ok(()),
    };
    match (volume.backend, backend(host)?) {
        ("zfs", Backend::Zfs(pool)) => zfs::remove(host, &pool, name)?,
        _ => directory::remove(host, name)?,
    }
    using::forget_all(host, name);
    Ok(())
}

fn mountpoint(volume: &Volume) -> String {
    volume.mountpoint.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
}

fn shown(volume: &Volume) -> Value {
    let created = jiff::Timestamp::from_second(volume.created).unwrap_or_default();
    let mut status = json!({"backend": volume.backend});
    if let Some(size) = volume.size {
        status["size"] = size.into();
    }
    json!({
        "Name": volume.name, "Mountpoint": mountpoint(volume), "CreatedAt": created.to_string(), "Status": status,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[allow(clippy::needless_pass_by_value, reason = "a body is written where it is asked with")]
    fn ask(host: &Host, verb: &str, body: Value) -> Value {
        let asked =
            Asked::read(&format!("/VolumeDriver.{verb}"), body.to_string().as_bytes()).unwrap().unwrap();
        asked.carry_out(host, "1.5.0").unwrap()
    }

    #[test]
    fn a_volume_of_a_machine_without_a_pool_is_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        let named = json!({"Name": "data", "ID": "a1"});
        let error = |answer: &Value| answer["Err"].as_str().unwrap().to_owned();
        assert_eq!(ask(&host, "List", json!({}))["Volumes"], json!([]));
        assert!(error(&ask(&host, "Get", named.clone())).contains("there is no volume data"));
        assert!(error(&ask(&host, "Mount", named.clone())).contains("there is no volume data"));
        let sized = ask(&host, "Create", json!({"Name": "data", "Opts": {"size": "1g"}}));
        assert!(error(&sized).contains("--storage zfs"), "{sized}");
        for _ in 0..2 {
            assert_eq!(error(&ask(&host, "Create", json!({"Name": "data", "Opts": null}))), "");
        }
        let mounted = ask(&host, "Mount", named.clone());
        let path = mounted["Mountpoint"].as_str().unwrap().to_owned();
        std::fs::write(format!("{path}/file"), "kept").unwrap();
        assert_eq!(ask(&host, "Get", named.clone())["Volume"]["Mountpoint"], path.as_str());
        assert_eq!(ask(&host, "Path", named.clone())["Mountpoint"], path.as_str());
        assert_eq!(ask(&host, "List", json!({}))["Volumes"][0]["Name"], "data");
        assert_eq!(error(&ask(&host, "Unmount", named.clone())), "");
        assert_eq!(error(&ask(&host, "Unmount", named.clone())), "");
        assert_eq!(error(&ask(&host, "Create", json!({"Name": "data"}))), "", "made again, and not emptied");
        assert_eq!(std::fs::read_to_string(format!("{path}/file")).unwrap(), "kept");
        assert_eq!(error(&ask(&host, "Remove", named.clone())), "");
        assert!(!std::path::Path::new(&path).exists());
        assert_eq!(error(&ask(&host, "Remove", named)), "");
        assert_eq!(ask(&host, "List", json!({}))["Volumes"], json!([]));
    }

    #[test]
    fn what_is_no_name_is_said_and_nothing_is_made() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        let long = "a".repeat(LONGEST_NAME + 1);
        for name in ["", ".", "..", "../x", "a/b", "-a", ".a", "a b", "a\n", "ä", "a\u{0}", long.as_str()] {
            let answer = ask(&host, "Create", json!({"Name": name}));
            assert!(answer["Err"].as_str().unwrap().contains("is no name"), "{name:?}: {answer}");
        }
        for id in ["", "..", "a/b", "a.b"] {
            let answer = ask(&host, "Mount", json!({"Name": "a", "ID": id}));
            assert!(answer["Err"].as_str().unwrap().contains("id of the mount"), "{id:?}: {answer}");
        }
        let option = ask(&host, "Create", json!({"Name": "a", "Opts": {"type": "nfs"}}));
        assert!(option["Err"].as_str().unwrap().contains("\"type\" is not known"), "{option}");
        let size = ask(&host, "Create", json!({"Name": "a", "Opts": {"size": "much"}}));
        assert!(size["Err"].as_str().unwrap().contains("\"much\" is none"), "{size}");
        assert!(!host.volumes().exists());
        assert!(Asked::read("/VolumeDriver.Get", b"{").is_err());
        assert!(Asked::read("/VolumeDriver.Other", b"{}").unwrap().is_none());
        assert!(Asked::read("/", b"{}").unwrap().is_none());
    }

    #[test]
    fn a_look_that_cannot_tell_is_not_answered() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        std::fs::create_dir_all(host.storage_json().parent().unwrap()).unwrap();
        std::fs::write(host.storage_json(), "damaged").unwrap();
        for verb in ["Get", "Path", "List", "Unmount"] {
            let body = json!({"Name": "data", "ID": "a1"}).to_string();
            let asked = Asked::read(&format!("/VolumeDriver.{verb}"), body.as_bytes()).unwrap().unwrap();
            let why = asked.carry_out(&host, "1.5.0").unwrap_err().to_string();
            assert!(why.contains("storage.json is not understood"), "{verb}: {why}");
        }
        for verb in ["Create", "Mount", "Remove"] {
            let answer = ask(&host, verb, json!({"Name": "data", "ID": "a1"}));
            assert!(answer["Err"].as_str().unwrap().contains("is not understood"), "{verb}: {answer}");
        }
    }

    #[test]
    fn a_directory_without_data_in_it_is_the_place_of_a_mount_and_not_served() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        std::fs::create_dir_all(host.volumes().join("data")).unwrap();
        std::os::unix::fs::symlink("/etc", host.volumes().join("link")).unwrap();
        for name in ["data", "link"] {
            let answer = ask(&host, "Mount", json!({"Name": name, "ID": "a"}));
            assert!(answer["Err"].as_str().unwrap().contains("there is no volume"), "{answer}");
        }
        assert_eq!(ask(&host, "List", json!({}))["Volumes"], json!([]));
    }
}
