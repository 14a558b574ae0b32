//! A host under a temporary root, a release source on loopback, and what an installation does to them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kit::release::Published;
use kit::{Options, Server, Tls};
use ployz::host::Host;
use ployz::install::admission::observe;
use ployz::install::attempt::{Installation, Outcome, Record, State};
use ployz::install::events::{Event, Refusal};
use ployz::install::records::{Entry, ReadError, View, latest};
use ployz::install::release::{Channel, Version};
use ployz::install::{Mode, Request, Wanted, install};
use ployz::interrupt::Interrupt;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The real `ployzd`.
pub(crate) const PLOYZD: &str = env!("CARGO_BIN_EXE_ployzd");
/// Its version in a plain build.
pub(crate) const OWN: &str = env!("CARGO_PKG_VERSION");

/// Installations of one process at a time. An installation starts processes and is written for a process of its own:
/// a child that another thread starts meanwhile inherits, until it execs, the descriptor through which a new
/// executable is being written (then that executable is "busy"), and what is nobody's child is ended as an orphan.
#[derive(Debug)]
pub(crate) struct Alone(#[allow(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

/// Waits until no other test of this process runs.
pub(crate) fn alone() -> Alone {
    static ALONE: Mutex<()> = Mutex::new(());
    Alone(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// One host and its release source. Gone when it is dropped.
pub(crate) struct World {
    pub(crate) host: Host,
    pub(crate) server: Server,
    pub(crate) interrupt: Interrupt,
    /// What was told in the last installation.
    pub(crate) told: RefCell<Vec<Value>>,
    site: TempDir,
    root: TempDir,
}

impl World {
    /// An empty host that trusts an HTTPS source.
    pub(crate) fn new(alone: &Alone) -> Self {
        Self::over(alone, Tls::Good)
    }

    /// The same with another kind of source.
    pub(crate) fn over(_alone: &Alone, tls: Tls) -> Self {
        let directory = |name: &str| tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let (site, root) = (directory("site-"), directory("root-"));
        let server = Server::start(Options::new(site.path()).tls(tls)).unwrap();
        let host = Host::under(root.path(), Path::new(PLOYZD));
        let interrupt = Interrupt::hold().unwrap();
        fs::create_dir_all(host.bin()).unwrap();
        let world = Self { host, server, interrupt, told: RefCell::default(), site, root };
        world.settings(&json!({}));
        world
    }

    /// Where the host is.
    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    /// What the source serves.
    pub(crate) fn site(&self) -> &Path {
        self.site.path()
    }

    /// Root's settings: this source, deadlines that no busy machine comes near, and what the test adds or replaces
    /// (all deadlines at once).
    pub(crate) fn settings(&self, more: &Value) {
        let ca = self.root().join("ca.pem");
        self.server.write_ca(&ca).unwrap();
        let mut settings = json!({
            "schema": 1, "releases": self.server.url() + "/releases/download", "channels": self.server.url(),
            "ca_file": ca, "deadlines": {"pointer": 60, "stall": 20, "acquire": 60, "preflight": 60},
        });
        for (key, value) in more.as_object().unwrap() {
            settings[key] = value.clone();
        }
        self.settings_text(&settings.to_string());
    }

    /// Root's settings as they are.
    pub(crate) fn settings_text(&self, text: &str) {
        fs::create_dir_all(self.host.settings().parent().unwrap()).unwrap();
        fs::write(self.host.settings(), text).unwrap();
    }

    /// Publishes a release that holds this `ployzd`.
    pub(crate) fn publish(&self, version: &str, ployzd: impl AsRef<[u8]>) -> Published {
        kit::release::tree(self.site(), version, &[("ployzd", ployzd.as_ref())]).unwrap()
    }

    /// Publishes a release whose `ployzd` is a script that says so.
    pub(crate) fn release(&self, version: &str) -> Published {
        self.publish(version, script(version))
    }

    /// Installs.
    pub(crate) fn install(&self, request: &Request) -> Result<Record, Refusal> {
        self.install_while(request, &mut |_| Ok(()))
    }

    /// Installs, and does this at every event.
    pub(crate) fn install_while(
        &self,
        request: &Request,
        at: &mut dyn FnMut(&Event<'_>) -> io::Result<()>,
    ) -> Result<Record, Refusal> {
        self.told.borrow_mut().clear();
        install(&self.host, request, &self.interrupt, &mut |event| {
            self.told.borrow_mut().push(serde_json::to_value(event).unwrap());
            at(event)
        })
    }

    /// Installs what must succeed.
    pub(crate) fn installed(&self, request: &Request) -> Record {
        let record = self.install(request).unwrap_or_else(|refusal| panic!("refused: {refusal}"));
        assert!(matches!(record.outcome, Some(Outcome::Installed { .. })), "{record:#?}");
        record
    }

    /// Installs what must be refused before it is accepted: says why, and checks that it left nothing.
    pub(crate) fn refused(&self, request: &Request) -> String {
        let before = self.attempts();
        let text = match self.install(request) {
            Ok(record) => panic!("accepted: {record:#?}"),
            Err(refusal) => refusal.to_string(),
        };
        assert_eq!(self.attempts(), before, "a refusal makes no record");
        assert_eq!(self.left_over(), NONE, "after: {text}");
        text
    }

    /// Installs what must fail with the installation unchanged: reason and error, and checks that nothing is left and
    /// nothing that is installed was touched.
    pub(crate) fn failed(&self, request: &Request) -> (String, String) {
        let before = self.installation();
        let record = self.install(request).unwrap_or_else(|refusal| panic!("refused: {refusal}"));
        let Some(Outcome::Failed { reason, error, causes, .. }) = &record.outcome else {
            panic!("did not fail: {record:#?}")
        };
        let error = std::iter::once(error).chain(causes).cloned().collect::<Vec<_>>().join("; ");
        assert_eq!(record.installation, Installation::Unchanged, "{error}");
        assert_eq!(record.switched, NONE_SWITCHED, "{error}");
        assert_eq!(self.installation(), before, "{error}");
        assert_eq!(self.left_over(), NONE, "{error}");
        (reason.clone(), error)
    }

    /// Everything that is installed, or would be run.
    pub(crate) fn installation(&self) -> Snapshot {
        let mut all = snapshot(&self.host.bin());
        for dir in [self.host.units(), self.host.admin_units()] {
            all.extend(snapshot(&dir));
        }
        all.extend(snapshot(&self.host.installed_json()));
        all
    }

    /// The records that are there.
    pub(crate) fn attempts(&self) -> Vec<PathBuf> {
        snapshot(&self.host.attempts()).into_keys().collect()
    }

    /// What an installation must not leave.
    pub(crate) fn left_over(&self) -> Vec<PathBuf> {
        left_over(&self.host, self.root())
    }

    /// Lets the current release count as one that was confirmed: only systemd's readiness does that otherwise.
    pub(crate) fn confirm(&self) {
        let mut inventory = self.inventory();
        inventory["current"]["confirmed"] = true.into();
        fs::write(self.host.installed_json(), inventory.to_string()).unwrap();
    }

    /// `installed.json`.
    pub(crate) fn inventory(&self) -> Value {
        serde_json::from_slice(&fs::read(self.host.installed_json()).unwrap()).unwrap()
    }
}

/// The newest attempt and its state, as a reader sees them.
pub(crate) fn newest(world: &World) -> Result<Option<(Entry, State)>, ReadError> {
    let in_place = fs::read(world.host.installed()).ok().map(|bytes| kit::release::sha256(&bytes));
    let look = || observe(&world.host);
    let seen = latest(&world.host, View { admission: &look, in_place: in_place.as_deref() })?;
    Ok(seen.map(|seen| {
        let entry = match serde_json::from_value(seen.record.clone()) {
            Ok(record) if seen.record["schema"] == 1 => Entry::Record(Box::new(record)),
            _ => Entry::Newer(seen.record.as_object().unwrap().clone()),
        };
        (entry, seen.state)
    }))
}

/// What an installation must not leave: staged files, copies of its own, half-written files.
pub(crate) fn left_over(host: &Host, root: &Path) -> Vec<PathBuf> {
    let staged = [host.staging(), host.own_copies()];
    let is_staged = |path: &PathBuf| staged.iter().any(|dir| path.starts_with(dir) && path != dir);
    let hidden = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with('.');
    snapshot(root).into_keys().filter(|path| is_staged(path) || hidden(path)).collect()
}

/// Nothing left over.
pub(crate) const NONE: [PathBuf; 0] = [];
/// No file switched.
pub(crate) const NONE_SWITCHED: [String; 0] = [];

/// What is at and below a path: type, mode, links, inode, time and content of each.
pub(crate) type Snapshot = BTreeMap<PathBuf, String>;

/// Looks at what is at and below a path; what is not there is not looked at.
pub(crate) fn snapshot(path: &Path) -> Snapshot {
    let mut all = Snapshot::new();
    let Ok(meta) = fs::symlink_metadata(path) else { return all };
    let content = if meta.is_symlink() {
        fs::read_link(path).unwrap().display().to_string()
    } else if meta.is_file() {
        kit::release::sha256(&fs::read(path).unwrap())
    } else {
        for entry in fs::read_dir(path).unwrap() {
            all.extend(snapshot(&entry.unwrap().path()));
        }
        // A directory's own time changes with what comes and goes in it.
        all.insert(path.to_owned(), format!("{:o} {}", meta.mode(), meta.ino()));
        return all;
    };
    let (seconds, nanos) = (meta.mtime(), meta.mtime_nsec());
    let line = format!("{:o} {} {} {seconds}.{nanos:09} {content}", meta.mode(), meta.nlink(), meta.ino());
    all.insert(path.to_owned(), line);
    all
}

/// Units that a script answers with.
pub(crate) const UNITS: &str = r#"[{"name":"ployz.socket","content":"[Socket]\nListenStream=/run/ployz/ployz.sock\n[Install]\nWantedBy=sockets.target\n","enable":true,"start":true},{"name":"ployz.service","content":"[Service]\nExecStart=/usr/local/bin/ployzd daemon\n[Install]\nWantedBy=multi-user.target\n","enable":true,"start":true}]"#;

/// A script that answers as a `ployzd` of this version.
pub(crate) fn script(version: &str) -> Vec<u8> {
    script_that("", version, UNITS)
}

/// The same with commands before the answer, and other units.
pub(crate) fn script_that(does: &str, version: &str, units: &str) -> Vec<u8> {
    let text = format!(
        "#!/bin/sh\n{does}\ncase \"$*\" in\n\
         'version --json') printf '%s\\n' '{{\"version\":\"{version}\"}}' ;;\n\
         'units --json') printf '%s\\n' '{units}' ;;\n*) exit 2 ;;\nesac\n"
    );
    text.into_bytes()
}

/// A version.
pub(crate) fn version(text: &str) -> Version {
    text.parse().unwrap()
}

/// A request for files only: there is no systemd under a temporary root.
pub(crate) fn request(wanted: Wanted) -> Request {
    Request {
        wanted,
        label: None,
        local: None,
        mode: Mode::InstallationOnly,
        docker: None,
        storage: None,
        operators: Vec::new(),
        own_version: version("1.0.0"),
    }
}

/// For an exact version from the source.
pub(crate) fn exact(text: &str) -> Request {
    request(Wanted::Exact(version(text)))
}

/// For what a channel points to.
pub(crate) fn channel(channel: Channel) -> Request {
    request(Wanted::Channel(channel))
}

/// For an exact version from an archive that is here, with the `checksums.txt` beside it.
pub(crate) fn from_disk(text: &str, published: &Published) -> Request {
    let checksums = published.directory.join("checksums.txt");
    Request { local: Some((published.archive.clone(), checksums)), ..exact(text) }
}
