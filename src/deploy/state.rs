//! What the worker keeps in its own directory: who deploys now, which engine holds the services, and a replacement that
//! is not finished. Nothing of it is a copy of what Docker knows, but for what Docker would forget with its store.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::docker::Engine;
use crate::durable::{read_bounded, sync_parent, write_whole};
use crate::host::{Account, Host};

const SCHEMA: u32 = 1;
const MOST: usize = 256 * 1024;

/// The engine on which services were deployed, and which they are: a store that was changed shows none of them, and that
/// is not the same as none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Memory {
    schema: u32,
    id: String,
    root: String,
    driver: String,
    /// By name.
    pub(super) services: BTreeSet<String>,
}

impl Memory {
    /// Reads it. One that can't be read is an empty one: Docker says what runs.
    pub(super) fn read(host: &Host) -> Self {
        read(&path(host, "services.json")).unwrap_or_default()
    }

    /// What is different about an engine that does not hold these services, in words.
    pub(super) fn another(&self, engine: &Engine) -> Option<String> {
        if self.services.is_empty() {
            return None;
        }
        let pairs = [
            ("its data was in", &self.root, &engine.root),
            ("its storage driver was", &self.driver, &engine.driver),
            ("its id was", &self.id, &engine.id),
        ];
        let (what, before, now) = pairs.into_iter().find(|(_, before, now)| before != now)?;
        let names: Vec<&str> = self.services.iter().map(String::as_str).collect();
        Some(format!(
            "this is not the Docker on which {} was deployed: {what} {before} and is {now}",
            names.join(", ")
        ))
    }

    /// Notes that a service is there, on this engine.
    pub(super) fn add(&mut self, host: &Host, engine: &Engine, service: &str) -> io::Result<()> {
        self.schema = SCHEMA;
        (self.id, self.root, self.driver) = (engine.id.clone(), engine.root.clone(), engine.driver.clone());
        self.services.insert(service.to_owned());
        write(host, "services.json", self)
    }

    /// Notes that it is not there any more.
    pub(super) fn forget(&mut self, host: &Host, service: &str) -> io::Result<()> {
        if self.services.remove(service) { write(host, "services.json", self) } else { Ok(()) }
    }
}

/// A replacement that has begun: written before the old container is touched, gone when one of the two serves alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Replacing {
    schema: u32,
    /// The service.
    pub(super) service: String,
    /// The container that served, if there was one.
    pub(super) old: Option<Old>,
    /// The container that is to serve.
    pub(super) next: String,
    /// The new one works: what is left is forward. Before that it is back.
    pub(super) committed: bool,
}

/// The container that served, and how it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Old {
    pub(super) id: String,
    pub(super) running: bool,
    /// Its restart policy.
    pub(super) restart: String,
}

impl Replacing {
    pub(super) fn new(service: &str, old: Option<Old>, next: &str) -> Self {
        Self { schema: SCHEMA, service: service.into(), old, next: next.into(), committed: false }
    }

    /// The one that is not finished.
    pub(super) fn read(host: &Host) -> Option<Self> {
        read(&path(host, "replacing.json"))
    }

    pub(super) fn write(&self, host: &Host) -> io::Result<()> {
        write(host, "replacing.json", self)
    }

    /// It is finished.
    pub(super) fn end(host: &Host) -> io::Result<()> {
        let path = path(host, "replacing.json");
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => sync_parent(&path),
        }
    }
}

fn path(host: &Host, name: &str) -> PathBuf {
    host.deploy_state().join(name)
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let text = read_bounded(path, MOST).ok()?;
    match serde_json::from_slice(&text) {
        Ok(value) => Some(value),
        Err(e) => {
            tracing::warn!("{path:?} is not understood and not used: {e}");
            None
        }
    }
}

fn write(host: &Host, name: &str, value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    text.push(b'\n');
    // The worker is not privileged: the file is its own by being made by it.
    write_whole(host, &path(host, name), &text, 0o600, Account { uid: 0, gid: 0 })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn another_store_is_told_from_an_empty_one() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        std::fs::create_dir_all(host.deploy_state()).unwrap();
        let engine = Engine {
            version: "26".into(),
            api: "1.45".into(),
            id: "one".into(),
            root: "/var/lib/docker".into(),
            driver: "overlay2".into(),
            containerd_store: false,
            live_restore: true,
            running: 0,
        };
        let moved = Engine { root: "/srv/docker".into(), ..engine.clone() };
        let mut memory = Memory::read(&host);
        assert_eq!(memory.another(&moved), None, "there is nothing to lose");
        memory.add(&host, &engine, "web").unwrap();
        let mut memory = Memory::read(&host);
        assert_eq!(memory.another(&engine), None);
        assert!(memory.another(&moved).unwrap().contains("/var/lib/docker and is /srv/docker"));
        let store = Engine { driver: "overlayfs".into(), ..engine };
        assert!(memory.another(&store).unwrap().contains("overlay2 and is overlayfs"));
        memory.forget(&host, "web").unwrap();
        assert_eq!(Memory::read(&host).another(&moved), None);
        for damaged in ["", "{", "[]", "\0"] {
            std::fs::write(path(&host, "services.json"), damaged).unwrap();
            assert_eq!(Memory::read(&host), Memory::default());
        }
    }

    #[test]
    fn a_replacement_is_read_back_until_it_ends() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        std::fs::create_dir_all(host.deploy_state()).unwrap();
        assert_eq!(Replacing::read(&host), None);
        let old = Old { id: "0a".into(), running: true, restart: "always".into() };
        let replacing = Replacing::new("web", Some(old), "0b");
        replacing.write(&host).unwrap();
        assert_eq!(Replacing::read(&host), Some(replacing));
        Replacing::end(&host).unwrap();
        Replacing::end(&host).unwrap();
        assert_eq!(Replacing::read(&host), None);
    }
}
