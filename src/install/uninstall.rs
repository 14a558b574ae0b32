//! Removal: Ployz goes, what others use or cannot be had again stays, and both are said, item by item. Each step can be
//! done again: whatever was cut off or failed, the same command goes on where it was.
//!
//! 1. the daemon, the doors and the workers are stopped; then admission, so that nobody installs meanwhile;
//! 2. the containers of our services, while their volumes can still be unmounted;
//! 3. every unit of ours, stopped, unhooked and removed;
//! 4. sockets, staging, descriptions; with *purge* state, records, settings and accounts;
//! 5. what Docker remembers of the plugin, which would have it wait for the one that is gone;
//! 6. the executable, last, so that this can be typed again until then.
//!
//! What is said to be removed was looked for afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use serde_json::Value;

use super::admission::{self, Observed};
use super::events::Refusal;
use super::host as prepare;
use super::installed::Inventory;
use super::recover;
use super::stopped::Stopped;
use super::units::{DEPLOY_DOOR, DOOR, SERVICE, SOCKET};
use crate::command::Run;
use crate::docker::{Docker, DockerError, escaped};
use crate::durable::sync_parent;
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::storage::{self, Backend};
use crate::systemd::Systemd;
use crate::text::printable;

/// For one call of systemctl.
const SYSTEMCTL: Duration = Duration::from_secs(75);
/// For one call of userdel or groupdel.
const ACCOUNT: Duration = Duration::from_secs(30);
/// For Docker to list its volumes, when it waits for nobody.
const VOLUMES: Duration = Duration::from_secs(3);
/// For Docker to stop and remove one container.
const CONTAINER: Duration = Duration::from_secs(40);

/// What came of it.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// What is gone, and was there.
    pub removed: Vec<String>,
    /// What is still there, on purpose.
    pub kept: Vec<Kept>,
    /// What could not be removed.
    pub failed: Vec<Failed>,
}

/// Something that stays.
#[derive(Debug, Serialize)]
pub struct Kept {
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
}

/// Something that should be gone and is not.
#[derive(Debug, Serialize)]
pub struct Failed {
    /// What.
    pub what: String,
    /// What was observed.
    pub error: String,
    /// What to type.
    pub help: String,
}

/// Removes Ployz from this Machine.
///
/// # Errors
/// A refusal: nothing was removed, and what was stopped runs again.
pub fn uninstall(host: &Host, purge: bool, interrupt: &Interrupt) -> Result<Report, Refusal> {
    super::can_run_children(host)?;
    let mut work = Work { host, systemd: None, report: Report::default(), interrupt };
    if work.nothing_is_here(purge) {
        return Ok(work.report);
    }
    let observed = admission::observe(host);
    if matches!(observed, Observed::Installing { .. }) {
        return Err(Refusal::Busy(admission::busy(host, observed)));
    }
    let systemd = host.systemd_runs().then(|| Systemd::new(SYSTEMCTL));
    work.systemd = systemd;
    let stopped = systemd.map(|systemd| Stopped::stop(systemd, &[SOCKET, SERVICE, DEPLOY_DOOR, DOOR]));
    let admission = recover::admit(host, "uninstall", stopped.as_ref().and_then(Stopped::failed))?;
    if let Some(stopped) = stopped {
        stopped.stays();
    }
    work.containers();
    work.units();
    work.files();
    work.docker_forgets();
    if purge {
        work.purge();
    } else {
        work.keep();
    }
    // What failed is gone on with by the same command: until then there is one.
    if work.goes_on() && work.report.failed.is_empty() {
        work.tree(&host.installed());
    }
    if purge && work.goes_on() && work.report.failed.is_empty() {
        // The lock goes last, and nobody can have taken it before.
        work.tree(&host.install_state());
    }
    drop(admission);
    Ok(work.report)
}

struct Work<'a> {
    host: &'a Host,
    systemd: Option<Systemd>,
    report: Report,
    interrupt: &'a Interrupt,
}

impl Work<'_> {
    fn removed(&mut self, what: impl Into<String>) {
        let what = what.into();
        tracing::info!("removed {what}");
        self.report.removed.push(what);
    }

    fn kept(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.report.kept.push(Kept { what: what.into(), why: why.into() });
    }

    #[allow(clippy::needless_pass_by_value, reason = "errors come as they are")]
    fn failed(&mut self, what: impl Into<String>, error: impl ToString, help: impl Into<String>) {
        let (what, error, help) = (what.into(), error.to_string(), help.into());
        tracing::warn!("{what} could not be removed: {error}");
        self.report.failed.push(Failed { what, error, help });
    }

    /// Whether nobody asked for an end; said once.
    fn goes_on(&mut self) -> bool {
        let Some(signal) = self.interrupt.requested() else { return true };
        if !self.report.failed.iter().any(|failed| failed.what == "the rest") {
            self.failed("the rest", format!("cancelled by {signal}"), "go on with the same command");
        }
        false
    }

    fn nothing_is_here(&self, purge: bool) -> bool {
        let host = self.host;
        let mut paths = vec![
            host.installed(),
            host.previous(),
            host.lib(),
            host.sysusers(),
            host.deploy_door(),
            host.api(),
        ];
        if purge {
            paths.extend([host.state(), host.install_state(), host.deploy_state(), host.settings()]);
        }
        let any_account = purge && !prepare::ours(host).is_empty();
        !any_account
            && unit_files(host).is_empty()
            && !paths.iter().any(|path| fs::symlink_metadata(path).is_ok())
    }

    /// The containers of our services; images and volumes are others' to remove.
    fn containers(&mut self) {
        let docker = Docker::at(self.host.docker());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        match runtime.block_on(services(&docker)) {
            Ok(all) => {
                for (name, id) in all {
                    if !self.goes_on() {
                        return;
                    }
                    match runtime.block_on(remove_container(&docker, &id)) {
                        Ok(()) => self.removed(format!("container {name}")),
                        Err(e) => self.failed(format!("container {name}"), e, format!("docker rm -f {name}")),
                    }
                }
                for (volume, driver) in runtime.block_on(volumes(&docker)).unwrap_or_default() {
                    let why = match driver.as_str() {
                        "ployz" => "it holds data, and is Docker's to use again after the next installation",
                        _ => "it holds data of a service: docker volume rm removes it",
                    };
                    self.kept(format!("volume {volume}"), why);
                }
                self.kept("Docker, its images and networks", "they are the host's");
            }
            Err(DockerError::Absent(_)) => {}
            Err(e) => {
                let why = format!("{e}: start it and type this again, or remove them by hand: docker rm -f");
                self.kept("containers of services, if there are any", why);
            }
        }
    }

    /// Every unit of ours: stopped, unhooked from boot, removed; what an operator put beside them stays.
    fn units(&mut self) {
        if !self.goes_on() {
            return;
        }
        let host = self.host;
        let files = unit_files(host);
        let (inventory, _) = Inventory::read(host);
        let ours = |name: &String| is_unit(name);
        let names: BTreeSet<String> =
            files.iter().cloned().chain(inventory.units.into_iter().filter(ours)).collect();
        let loadable: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| !name.contains('@')).collect();
        if let Some(systemd) = self.systemd {
            let patterns = ["ployz-deploy@*.service", "ployz-upgrade@*.service"];
            let shown = systemd.show(&loadable).unwrap_or_default();
            let there = loadable
                .iter()
                .zip(&shown)
                .filter(|(_, unit)| unit.load != "not-found" || unit.active == "active");
            let there: Vec<&str> = there.map(|(name, _)| *name).chain(patterns).collect();
            if let Err(e) = systemd.stop(&there) {
                // What does not end is ended; what that leaves is seen below.
                tracing::warn!("stopping units: {e}");
                let _ = systemd.kill(&there);
            }
        }
        for link in links(host, &names) {
            self.file(&link);
        }
        for name in &files {
            self.file(&host.unit(name));
        }
        if let Some(systemd) = self.systemd {
            if let Err(e) = systemd.daemon_reload() {
                self.failed("what systemd has loaded", e, "systemctl daemon-reload");
            }
            let _ = systemd.reset_failed(&["ployz*"]);
            let shown = systemd.show(&loadable).unwrap_or_default();
            for (name, unit) in loadable.iter().zip(&shown) {
                if !matches!(unit.active.as_str(), "inactive" | "failed" | "") {
                    let error = format!("it is {} still (pid {})", unit.active, unit.main_pid);
                    self.failed(*name, error, format!("systemctl kill -s KILL {name}"));
                }
            }
        }
        for entry in fs::read_dir(host.admin_units()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("ployz") {
                self.kept(entry.path().display().to_string(), "an administrator put it there");
            }
        }
    }

    /// Sockets, staging, descriptions and the retained binary.
    fn files(&mut self) {
        let host = self.host;
        let mut paths = vec![host.volume_plugin(), host.volume_users()];
        paths.extend(
            [host.api(), host.door(), host.deploy_door()]
                .iter()
                .filter_map(|path| path.parent().map(Path::to_owned)),
        );
        paths.extend([host.lib(), host.sysusers(), host.previous()]);
        let left = fs::read_dir(host.bin()).into_iter().flatten().flatten();
        let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with(".ployzd."));
        paths.extend(left.map(|entry| entry.path()));
        for path in paths {
            if !self.goes_on() {
                return;
            }
            self.tree(&path);
        }
    }

    /// What a removal without purge leaves.
    fn keep(&mut self) {
        let host = self.host;
        let purge = "--purge removes it";
        for (path, what) in [
            (host.state(), "the Machine's identity and state"),
            (host.install_state(), "the records of attempts"),
            (host.deploy_state(), "which services were deployed"),
            (host.settings(), "root's settings"),
            (host.storage_json(), "where volumes are kept"),
            (host.defaults(), "root's settings"),
        ] {
            if fs::symlink_metadata(&path).is_ok() {
                self.kept(path.display().to_string(), format!("{what}: {purge}"));
            }
        }
        let accounts = prepare::ours(host);
        if !accounts.is_empty() {
            self.kept(accounts.join(", "), format!("files may belong to them: {purge}"));
        }
        self.keep_volumes();
    }

    /// Volumes stay, whatever is asked: what is in them can't be had again.
    fn keep_volumes(&mut self) {
        let root = self.host.volumes();
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            // The place of a mount is empty when nothing is mounted there; nothing else goes.
            let _ = fs::remove_dir(entry.path());
        }
        if fs::remove_dir(&root).is_ok() {
            self.removed(root.display().to_string());
        } else if fs::symlink_metadata(&root).is_ok() {
            self.kept(
                root.display().to_string(),
                format!("volumes are below it: rm -r {} removes them", root.display()),
            );
        }
        match storage::read(self.host) {
            Ok(Backend::Zfs(pool)) => self.kept(
                format!("pool {}", pool.pool),
                format!(
                    "volumes are in it ({}): the next install --storage zfs takes it up again, zpool destroy {} removes it",
                    pool.dataset, pool.pool
                ),
            ),
            Ok(Backend::Directory) => {}
            Err(why) => self.kept("where volumes are kept", why),
        }
    }

    /// A Docker that has asked a plugin once asks it at every look at its volumes, and waits 15 s for one that is gone,
    /// until it is restarted. That is done where no container can notice, and said otherwise.
    fn docker_forgets(&mut self) {
        let docker = Docker::at(self.host.docker());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let (Ok(runtime), Some(systemd), true) = (runtime, self.systemd, self.goes_on()) else { return };
        let waits = |answer: Result<Value, DockerError>| matches!(answer, Err(DockerError::Slow { .. }));
        let look = || runtime.block_on(docker.call(Method::GET, "/volumes", None, VOLUMES));
        if !waits(look()) {
            return;
        }
        let help =
            "until Docker is restarted each look at its volumes waits 15 s: systemctl restart docker.service";
        let what = "what Docker remembers of the volume plugin";
        let Ok(engine) = runtime.block_on(docker.engine()) else { return self.kept(what, help) };
        let users = runtime.block_on(users_of_the_plugin(&docker)).unwrap_or_else(|e| vec![e.to_string()]);
        if !users.is_empty() {
            return self.kept(what, format!("{} use it still; {help}", users.join(", ")));
        }
        if !engine.live_restore && engine.running > 0 {
            let containers = format!("{} containers end with it, since live-restore is off", engine.running);
            return self.kept(what, format!("{help} ({containers})"));
        }
        let restarted = systemd.restart(&["docker.service"]);
        if restarted.is_err() || waits(look()) {
            return self.kept(what, help);
        }
        self.removed(format!("{what} (it was restarted; {} containers went on)", engine.running));
    }

    fn purge(&mut self) {
        let host = self.host;
        let settings = host.settings();
        let settings = settings.parent().map_or_else(|| settings.clone(), Path::to_owned);
        for path in [host.state(), host.deploy_state(), settings, host.defaults()] {
            if !self.goes_on() {
                return;
            }
            self.tree(&path);
        }
        self.keep_volumes();
        let foreign = prepare::foreign_accounts(host);
        for problem in &foreign {
            self.kept(problem.what.clone(), "it is not one of Ployz's");
        }
        let is_foreign =
            |name: &str| foreign.iter().any(|problem| problem.what.starts_with(&format!("user {name} ")));
        for account in prepare::ours(host) {
            let Some((kind, name)) = account.split_once(' ') else { continue };
            if is_foreign(name) || !self.goes_on() {
                continue;
            }
            // userdel may have removed the group of that name with its user.
            if !prepare::ours(host).contains(&account) {
                self.removed(account);
                continue;
            }
            let tool = if kind == "user" { "userdel" } else { "groupdel" };
            let run = Run::new(host.tool(tool), ACCOUNT).args(["--", name]).check();
            match run {
                _ if !prepare::ours(host).contains(&account) => self.removed(account),
                Ok(_) => self.failed(
                    account.clone(),
                    format!("{tool} succeeded, and it is there all the same"),
                    format!("{tool} {name}"),
                ),
                Err(e) => self.failed(account.clone(), e, format!("{tool} {name}")),
            }
        }
    }

    fn file(&mut self, path: &Path) {
        self.gone(path, |path| fs::remove_file(path));
    }

    /// A file, or a directory with everything in it; a link is removed and not followed, a mount is left.
    fn tree(&mut self, path: &Path) {
        let Ok(meta) = fs::symlink_metadata(path) else { return };
        if !meta.is_dir() {
            return self.file(path);
        }
        if let Some(mount) = mount_at_or_below(path) {
            self.kept(path.display().to_string(), format!("{} is a filesystem of its own", mount.display()));
            return;
        }
        self.gone(path, |path| fs::remove_dir_all(path));
    }

    /// Removes, and looks.
    fn gone(&mut self, path: &Path, remove: impl Fn(&Path) -> io::Result<()>) {
        if fs::symlink_metadata(path).is_err() {
            return;
        }
        let removed = remove(path);
        let shown = path.display().to_string();
        match fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let _ = sync_parent(path);
                self.removed(shown);
            }
            _ => {
                let error = removed.err().map_or_else(|| "it is there again".to_owned(), |e| e.to_string());
                self.failed(shown.clone(), error, format!("look at it: ls -la {shown}; lsattr -d {shown}"));
            }
        }
    }
}

fn is_unit(name: &str) -> bool {
    name.starts_with("ployz")
        && (name.ends_with(".service") || name.ends_with(".socket"))
        && !name.contains('/')
}

/// The unit files of ours that are there.
fn unit_files(host: &Host) -> Vec<String> {
    let names = fs::read_dir(host.units()).into_iter().flatten().flatten();
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| is_unit(name));
    names.sort();
    names
}

/// The links by which units of ours are hooked into a boot.
fn links(host: &Host, names: &BTreeSet<String>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in fs::read_dir(host.admin_units()).into_iter().flatten().flatten() {
        let name = dir.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".wants") && !name.ends_with(".requires") {
            continue;
        }
        for entry in fs::read_dir(dir.path()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
            if is_link && (names.contains(&name) || is_unit(&name)) {
                found.push(entry.path());
            }
        }
    }
    found
}

/// A filesystem that is mounted at a directory or somewhere below it.
fn mount_at_or_below(path: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(path).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points =
        mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(|point| point.replace("\\040", " "));
    points.map(PathBuf::from).find(|point| point.starts_with(&path))
}

/// Containers that are ours by label and name: name and id.
async fn services(docker: &Docker) -> Result<Vec<(String, String)>, DockerError> {
    let all = docker
        .get(&format!("/containers/json?all=1&filters={}", escaped(r#"{"label":["ployz.service"]}"#)))
        .await?;
    let ours = all.as_array().into_iter().flatten().filter_map(|shown| {
        let service = shown["Labels"]["ployz.service"].as_str()?;
        let name = shown["Names"][0].as_str()?.strip_prefix('/')?;
        let is_ours = name == format!("ployz-{service}") || name == format!("ployz-{service}.next");
        is_ours.then(|| Some((printable(name), shown["Id"].as_str()?.to_owned())))?
    });
    Ok(ours.collect())
}

/// Volumes of services, and those of our driver: name and driver.
async fn volumes(docker: &Docker) -> Result<BTreeSet<(String, String)>, DockerError> {
    let mut found = BTreeSet::new();
    for filter in [r#"{"label":["ployz.service"]}"#, r#"{"driver":["ployz"]}"#] {
        let all = docker.get(&format!("/volumes?filters={}", escaped(filter))).await?;
        for volume in all["Volumes"].as_array().into_iter().flatten() {
            let text = |name: &str| printable(volume[name].as_str().unwrap_or_default());
            found.insert((text("Name"), text("Driver")));
        }
    }
    Ok(found)
}

/// Containers, whoever's, that have a volume of the plugin.
async fn users_of_the_plugin(docker: &Docker) -> Result<Vec<String>, DockerError> {
    let all = docker.get("/containers/json?all=1").await?;
    let uses = |shown: &&Value| {
        let mut mounts = shown["Mounts"].as_array().into_iter().flatten();
        mounts.any(|mount| mount["Driver"] == "ployz")
    };
    let users = all.as_array().into_iter().flatten().filter(uses);
    let names = users.map(|shown| shown["Names"][0].as_str().unwrap_or_default().trim_start_matches('/'));
    Ok(names.map(|name| format!("container {}", printable(name))).collect())
}

async fn remove_container(docker: &Docker, id: &str) -> Result<(), DockerError> {
    let _: Value = docker.call(Method::POST, &format!("/containers/{id}/stop?t=10"), None, CONTAINER).await?;
    match docker.call(Method::DELETE, &format!("/containers/{id}?force=1"), None, CONTAINER).await {
        Err(e) if e.status() == Some(404) => Ok(()),
        other => other.map(drop),
    }
}
