//! Docker on this Machine: one that is there is judged and never changed; where there is none it is installed, configured,
//! started and looked at.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::daemon_json::{self, Merge};
use super::distribution::{self, Distribution, Manager};
use super::packages::{Packages, half_configured};
use super::{Prepared, add_to_group};
use crate::command::Run;
use crate::docker::{self, DockerError, Engine};
use crate::durable::{make_dir, write_whole};
use crate::host::{Account, Host};
use crate::install::admission::Admission;
use crate::install::fetch;
use crate::install::installed::Docker as Choice;
use crate::install::preflight::Problem;
use crate::install::source::Settings;
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// Where Docker's own packages are published.
const REPOSITORY: &str = "https://download.docker.com/linux";
/// What they are called.
const PACKAGES: &[&str] = &["docker-ce", "docker-ce-cli", "containerd.io"];
const MOST_KEY: u64 = 64 * 1024;
/// For Docker to start and to answer.
const START: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(250);
/// How Docker's service is called.
const SERVICE: &str = "docker.service";

/// What there is of Docker.
enum There {
    /// Nothing.
    None,
    /// One that is used as it is.
    Good(Engine),
    /// One that an earlier run of this began to set up.
    Begun,
    /// One that can't be used.
    Bad(Problem),
}

/// Looks, without waking a Docker that was stopped.
fn look(host: &Host, systemd: Option<Systemd>) -> There {
    let bad = |what: String, help: &str| There::Bad(Problem::new(what, help));
    let shown = systemd.and_then(|systemd| systemd.show(&[SERVICE, "snap.docker.dockerd.service"]).ok());
    let (service, snap) = match shown.as_deref() {
        Some([service, snap, ..]) => (Some(service), Some(snap)),
        _ => (None, None),
    };
    let loaded = |unit: Option<&crate::systemd::Unit>| unit.is_some_and(|unit| unit.load == "loaded");
    if loaded(snap) {
        let what = "Docker is here as a snap, which confines it: it is not used".to_owned();
        return bad(
            what,
            "remove it (snap remove docker), or say that this Machine does without: --docker none",
        );
    }
    let begun = marker(host).exists();
    let socket = host.docker();
    if loaded(service) && service.is_some_and(|unit| unit.active != "active") {
        if begun {
            return There::Begun;
        }
        let state = service.map(|unit| unit.active.clone()).unwrap_or_default();
        return bad(
            format!("Docker is installed and not running ({SERVICE} is {state})"),
            "start it: systemctl start docker.service",
        );
    }
    if !loaded(service) && !socket.exists() {
        let program = ["usr/bin/dockerd", "usr/local/bin/dockerd", "usr/sbin/dockerd"];
        return match program.iter().map(|path| host.root().join(path)).find(|path| path.exists()) {
            Some(path) if !begun => bad(
                format!("{} is here, and no {SERVICE} and no socket of it", path.display()),
                "start it, or remove it; or say that this Machine does without: --docker none",
            ),
            _ => There::None,
        };
    }
    match docker::engine_now(socket) {
        Ok(engine) if engine.containerd_store => There::Good(engine),
        Ok(_) if begun => There::Begun,
        Ok(engine) => bad(
            format!(
                "Docker {} keeps images in its own store ({}), not in containerd's",
                engine.version, engine.driver
            ),
            "switch it as part of the host's maintenance (images have to be pulled again): set \
             {\"features\": {\"containerd-snapshotter\": true}} in /etc/docker/daemon.json, then systemctl restart docker",
        ),
        Err(DockerError::Absent(_) | DockerError::Stopped(_)) if begun => There::Begun,
        Err(e) => bad(e.to_string(), e.help()),
    }
}

/// What stands in the way of Docker as it was chosen: said before anything is changed.
pub(in crate::install) fn problems(host: &Host, systemd: Option<Systemd>, choice: Choice) -> Vec<Problem> {
    if choice == Choice::None {
        return Vec::new();
    }
    let without = "or say that this Machine does without: --docker none";
    match look(host, systemd) {
        There::Good(_) => Vec::new(),
        There::Bad(problem) => vec![problem],
        There::None | There::Begun => {
            let mut problems = Vec::new();
            match distribution::find(host) {
                Err(what) => problems.push(Problem::new(
                    format!("there is no Docker here, and how it is installed on {what:?} is not known"),
                    format!("install Docker by hand, then type this again; {without}"),
                )),
                Ok(distribution) => {
                    let program = distribution.manager.program();
                    if host.find_tool(program).is_none() {
                        let what = format!("there is no Docker here, and no {program} to install it");
                        let help = format!("install Docker by hand, then type this again; {without}");
                        problems.push(Problem::new(what, help));
                    } else if let Some(why) = half_configured(host, distribution.manager) {
                        let what = format!("an installation of packages was cut off here: {why}");
                        problems.push(Problem::new(what, "finish it: dpkg --configure -a"));
                    }
                }
            }
            if let Err(why) = daemon_json::look(&host.daemon_json()) {
                let help =
                    format!("correct it, so that it can be added to: {}", host.daemon_json().display());
                problems.push(Problem::new(why, help));
            }
            problems
        }
    }
}

/// What would be done, for people.
pub(in crate::install) fn plan(host: &Host, systemd: Option<Systemd>, choice: Choice) -> Option<String> {
    match (choice, look(host, systemd)) {
        (Choice::Auto, There::None | There::Begun) => {
            let distribution = distribution::find(host).ok()?;
            Some(format!("installed by {}, configured and started", distribution.manager.program()))
        }
        _ => None,
    }
}

/// What preparing needs to know.
pub(in crate::install) struct Asked<'a> {
    pub(in crate::install) host: &'a Host,
    pub(in crate::install) settings: &'a Settings,
    pub(in crate::install) systemd: Option<Systemd>,
    pub(in crate::install) choice: Choice,
    /// Whether Docker is installed where there is none.
    pub(in crate::install) installs: bool,
    pub(in crate::install) interrupt: &'a Interrupt,
}

/// Docker as it was chosen, and the deploy worker in its group.
pub(in crate::install) fn prepare(
    asked: &Asked<'_>,
    tell: &mut dyn FnMut(&str),
    _admission: &Admission,
) -> Result<Prepared, String> {
    let mut prepared = Prepared::default();
    let host = asked.host;
    if asked.choice == Choice::None {
        return Ok(prepared);
    }
    if asked.installs {
        match look(host, asked.systemd) {
            There::Good(engine) => {
                if !engine.live_restore {
                    prepared.warnings.push(
                        "Docker's live-restore is off: containers end when Docker itself is restarted".into(),
                    );
                }
            }
            There::Bad(problem) => return Err(format!("{}; {}", problem.what, problem.help)),
            There::None | There::Begun => install(asked, tell, &mut prepared)?,
        }
    }
    if host.group("docker").is_some()
        && host.privileged()
        && add_to_group(host, "ployz-deploy", "docker", asked.settings.deadlines.packages)?
    {
        prepared.done.push("ployz-deploy is in group docker".into());
    }
    Ok(prepared)
}

/// Installs, configures, starts and looks. What fails half-way is continued by the next run.
fn install(asked: &Asked<'_>, tell: &mut dyn FnMut(&str), prepared: &mut Prepared) -> Result<(), String> {
    let host = asked.host;
    let distribution = distribution::find(host)
        .map_err(|what| format!("how Docker is installed on {what:?} is not known"))?;
    prepared.warnings.extend(in_the_network(host, asked.systemd));
    begin(host).map_err(|e| format!("noting that Docker is being installed: {e}"))?;
    let before = configure(host, prepared)?;
    let undo = |why: String| {
        let restored = before.as_ref().map_or(Ok(()), |before| before.restore(host));
        let _ = std::fs::remove_file(marker(host));
        match restored {
            Ok(()) => format!("{why}; daemon.json is as it was"),
            Err(e) => format!("{why}; daemon.json could not be put back: {e}"),
        }
    };
    let from = packages(asked, distribution, tell).map_err(undo)?;
    prepared.done.push(format!("Docker installed by {}: {from}", distribution.manager.program()));
    let engine = start(asked)?;
    let _ = std::fs::remove_file(marker(host));
    prepared.done.push(format!(
        "Docker {} runs: API {}, containerd's image store{}",
        engine.version,
        engine.api,
        if engine.live_restore { ", live-restore" } else { "" }
    ));
    Ok(())
}

fn marker(host: &Host) -> PathBuf {
    host.lib().join("docker-setup")
}

fn begin(host: &Host) -> std::io::Result<()> {
    make_dir(&host.lib(), 0o755)?;
    write_whole(host, &marker(host), b"Docker is being set up\n", 0o644, Account { uid: 0, gid: 0 })
}

/// daemon.json before the packages: a package that starts Docker by itself starts it as it shall be.
fn configure(host: &Host, prepared: &mut Prepared) -> Result<Option<daemon_json::Before>, String> {
    let path = host.daemon_json();
    match daemon_json::look(&path)? {
        Merge::Nothing => Ok(None),
        Merge::Write(text, notes) => {
            let written = make_dir(path.parent().unwrap_or(&path), 0o755)
                .and_then(|()| daemon_json::write(host, &path, &text));
            let before = written.map_err(|e| format!("writing {}: {e}", path.display()))?;
            prepared.done.push(format!("{} written", path.display()));
            prepared.warnings.extend(notes);
            Ok(Some(before))
        }
    }
}

/// Installs the packages: Docker's own where they are to be had, else the distribution's. Says which.
fn packages(
    asked: &Asked<'_>,
    distribution: Distribution,
    tell: &mut dyn FnMut(&str),
) -> Result<String, String> {
    let host = asked.host;
    let deadline = asked.settings.deadlines.packages;
    let manager = distribution.manager;
    let mut packages = Packages { host, manager, deadline, interrupt: asked.interrupt, tell };
    packages.refresh()?;
    if distribution.repository.is_some() && packages.has(PACKAGES[0]) {
        packages.install(PACKAGES)?;
        return Ok(format!("{} (from a source that was configured already)", PACKAGES.join(", ")));
    }
    let added = match distribution.repository {
        None => Err("there are none for this distribution".to_owned()),
        Some(repository) => add_repository(asked, manager, repository),
    };
    match added {
        Ok(files) => {
            let installed = packages.refresh().and_then(|()| packages.install(PACKAGES));
            if installed.is_err() {
                for file in files {
                    let _ = std::fs::remove_file(file);
                }
            }
            installed?;
            Ok(format!("{} (Docker's own)", PACKAGES.join(", ")))
        }
        Err(why) if distribution.own.is_empty() => Err(format!(
            "Docker's own packages are not to be had ({why}), and the distribution's are too old"
        )),
        Err(why) => {
            packages.install(distribution.own)?;
            let own = distribution.own.join(", ");
            Ok(format!("{own} (the distribution's; Docker's own are not to be had: {why})"))
        }
    }
}

/// Writes the source list of Docker's own packages, when what it would lead to is there.
fn add_repository(
    asked: &Asked<'_>,
    manager: Manager,
    (path, suite): (&str, &str),
) -> Result<Vec<PathBuf>, String> {
    let host = asked.host;
    let key_at = path.split('/').next().unwrap_or(path);
    let key = fetch::fetch_small(
        host,
        asked.settings,
        &format!("{REPOSITORY}/{key_at}/gpg"),
        MOST_KEY,
        asked.interrupt,
    )
    .map_err(|e| e.to_string())?;
    if !key.trim_ascii().starts_with(b"-----BEGIN PGP PUBLIC KEY BLOCK-----") {
        return Err("its key is none".into());
    }
    let write = |path: &Path, text: &[u8]| {
        make_dir(path.parent().unwrap_or(path), 0o755)
            .and_then(|()| write_whole(host, path, text, 0o644, Account { uid: 0, gid: 0 }))
            .map_err(|e| format!("writing {}: {e}", path.display()))
    };
    let root = host.root();
    match manager {
        Manager::Apt => {
            let (key_path, list) = (
                root.join("etc/apt/keyrings/ployz-docker.asc"),
                root.join("etc/apt/sources.list.d/ployz-docker.list"),
            );
            write(&key_path, &key)?;
            let signed = key_path.display();
            write(
                &list,
                format!("deb [signed-by={signed}] {REPOSITORY}/{path} {suite} stable\n").as_bytes(),
            )?;
            Ok(vec![list, key_path])
        }
        Manager::Dnf | Manager::Yum => {
            let (key_path, list) = (
                root.join("etc/pki/rpm-gpg/ployz-docker.asc"),
                root.join("etc/yum.repos.d/ployz-docker.repo"),
            );
            write(&key_path, &key)?;
            let text = format!(
                "[ployz-docker]\nname=Docker\nbaseurl={REPOSITORY}/{path}/$basearch/stable\nenabled=1\ngpgcheck=1\n\
                 gpgkey=file://{}\n",
                key_path.display()
            );
            write(&list, text.as_bytes())?;
            Ok(vec![list, key_path])
        }
        Manager::Pacman | Manager::Zypper => Err("there are none for this package manager".into()),
    }
}

/// Starts it and waits until it answers as it shall.
fn start(asked: &Asked<'_>) -> Result<Engine, String> {
    let host = asked.host;
    let Some(systemd) = asked.systemd else { return Err("systemd can't be asked to start Docker".into()) };
    let systemd = systemd.within(START);
    let words = || {
        let journal = Run::new("journalctl", Duration::from_secs(10));
        let journal = journal.args(["-u", SERVICE, "-n", "5", "--no-pager", "-o", "cat"]).run();
        let text = journal.map(|ended| String::from_utf8_lossy(&ended.stdout).into_owned());
        crate::text::printable(&text.unwrap_or_default()).chars().take(600).collect::<String>()
    };
    let failed = |e: &dyn std::fmt::Display| format!("starting Docker: {e}; its last words: {}", words());
    systemd.enable(&[SERVICE]).map_err(|e| failed(&e))?;
    systemd.start(&[SERVICE]).map_err(|e| failed(&e))?;
    let started = Instant::now();
    let mut restarted = false;
    loop {
        match docker::engine_now(host.docker()) {
            Ok(engine) if engine.containerd_store => return Ok(engine),
            // Started by its package before its configuration was there, by a run that was cut off.
            Ok(_) if !restarted => {
                restarted = true;
                systemd.restart(&[SERVICE]).map_err(|e| failed(&e))?;
            }
            Ok(engine) => {
                return Err(format!(
                    "Docker {} runs with its own image store ({}), though {} asks for containerd's",
                    engine.version,
                    engine.driver,
                    host.daemon_json().display()
                ));
            }
            Err(DockerError::TooOld { .. } | DockerError::TooNew { .. } | DockerError::Foreign(_))
                if started.elapsed() >= LOOK =>
            {
                return docker::engine_now(host.docker()).map_err(|e| failed(&e));
            }
            Err(e) if started.elapsed() >= START => return Err(failed(&e)),
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// What else of this host's network Docker's rules meet.
fn in_the_network(host: &Host, systemd: Option<Systemd>) -> Vec<String> {
    let mut notes = Vec::new();
    let shown = systemd.and_then(|systemd| systemd.show(&["firewalld.service", "ufw.service"]).ok());
    for (name, unit) in ["firewalld", "ufw"].iter().zip(shown.unwrap_or_default()) {
        if unit.active == "active" {
            notes.push(format!("{name} is active: published ports of containers go past its rules, and a reload of it may drop Docker's"));
        }
    }
    let bridges = std::fs::read_dir(host.root().join("sys/class/net")).into_iter().flatten().flatten();
    let bridges: Vec<String> = bridges
        .filter(|entry| entry.path().join("bridge").is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name != "docker0")
        .collect();
    if !bridges.is_empty() {
        notes.push(format!(
            "there are bridges ({}): Docker sets the policy of forwarding to DROP, which may cut off what is behind them",
            bridges.join(", ")
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A host of a distribution whose package managers only write down what they are asked. `has` says whether its
    /// sources have Docker's own packages.
    fn recorded(os_release: &str, has: bool) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), Path::new("/nonexistent"));
        for dir in ["etc", "usr/bin", "var/lib/dpkg", "var/lib/pacman"] {
            std::fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        std::fs::write(root.path().join("etc/os-release"), os_release).unwrap();
        let log = root.path().join("log");
        for tool in ["apt-get", "apt-cache", "dpkg", "dnf", "yum", "pacman", "zypper"] {
            let path = root.path().join("usr/bin").join(tool);
            let candidate = if has { "1.0" } else { "(none)" };
            let text = format!(
                "#!/bin/sh\nset -e\ncase $* in\n'policy '*) echo '  Candidate: {candidate}'; exit 0 ;;\n\
                 *' info '*) exit {} ;;\n--audit) exit 0 ;;\nesac\nprintf '%s\\n' \"{tool} $*\" >>{}\n",
                u8::from(!has),
                log.display()
            );
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        (root, host)
    }

    fn installed(os_release: &str, has: bool) -> (Result<String, String>, String) {
        let (root, host) = recorded(os_release, has);
        let (settings, interrupt) = (Settings::defaults().unwrap(), Interrupt::never().unwrap());
        let asked = Asked {
            host: &host,
            settings: &settings,
            systemd: None,
            choice: Choice::Auto,
            installs: true,
            interrupt: &interrupt,
        };
        let from = packages(&asked, distribution::find(&host).unwrap(), &mut |_| ());
        let left = ["etc/apt", "etc/yum.repos.d", "etc/pki"].map(|dir| root.path().join(dir).exists());
        assert_eq!(left, [false; 3], "a source list was left");
        (from, std::fs::read_to_string(root.path().join("log")).unwrap_or_default())
    }

    #[test]
    fn each_package_manager_is_asked_for_what_its_distribution_has() {
        let apt = "apt-get -o DPkg::Lock::Timeout=300 -q";
        for (os_release, expected) in [
            (
                "ID=ubuntu\nVERSION_ID=24.04\n",
                format!(
                    "{apt} update\n{apt} -y -o Dpkg::Options::=--force-confold --no-install-recommends install docker.io\n"
                ),
            ),
            (
                "ID=fedora\nVERSION_ID=44\n",
                "dnf -y --setopt=install_weak_deps=False install moby-engine docker-cli\n".into(),
            ),
            ("ID=arch\n", "pacman --noconfirm --needed -S docker\n".into()),
            ("ID=opensuse-tumbleweed\n", "zypper --non-interactive install --no-recommends docker\n".into()),
            ("ID=amzn\nVERSION_ID=2023\n", "dnf -y --setopt=install_weak_deps=False install docker\n".into()),
            ("ID=amzn\nVERSION_ID=2\n", "yum -y install docker\n".into()),
        ] {
            let (from, log) = installed(os_release, false);
            assert!(from.unwrap().contains("the distribution's"), "{os_release}");
            assert_eq!(log, expected, "{os_release}");
        }
        // Docker's own, where a source for it is configured already.
        let (from, log) = installed("ID=fedora\nVERSION_ID=44\n", true);
        assert!(from.unwrap().contains("configured already"));
        assert!(log.ends_with("install docker-ce docker-ce-cli containerd.io\n"), "{log}");
        // Where the distribution's are too old and Docker's own are not to be had, nothing is installed.
        let (from, log) = installed("ID=debian\nVERSION_ID=12\n", false);
        assert!(from.unwrap_err().contains("too old"));
        assert_eq!(log, format!("{apt} update\n"));
    }

    #[test]
    fn what_can_not_be_installed_is_refused_before_anything_is_run() {
        let (root, host) = recorded("ID=slackware\nVERSION_ID=15\n", false);
        let said = |host: &Host| {
            let problems = problems(host, None, Choice::Auto);
            problems.into_iter().map(|problem| problem.what).collect::<Vec<_>>().join("; ")
        };
        assert!(said(&host).contains("slackware 15"), "{}", said(&host));
        std::fs::write(root.path().join("etc/os-release"), "ID=arch\n").unwrap();
        assert_eq!(said(&host), "");
        std::fs::remove_file(root.path().join("usr/bin/pacman")).unwrap();
        assert!(said(&host).contains("no pacman"), "{}", said(&host));
        assert!(problems(&host, None, Choice::None).is_empty());
        assert!(!root.path().join("log").exists(), "something was run");
    }

    #[test]
    fn another_package_manager_is_waited_for_and_named() {
        let (root, host) = recorded("ID=arch\n", false);
        std::fs::write(root.path().join("var/lib/pacman/db.lck"), "").unwrap();
        let interrupt = Interrupt::never().unwrap();
        let mut told = Vec::new();
        let mut tell = |text: &str| told.push(text.to_owned());
        let deadline = Duration::from_secs(1);
        let mut packages = Packages {
            host: &host,
            manager: Manager::Pacman,
            deadline,
            interrupt: &interrupt,
            tell: &mut tell,
        };
        let error = packages.install(&["docker"]).unwrap_err();
        assert!(error.contains("db.lck") && error.contains("nothing was ended"), "{error}");
        assert!(told[0].starts_with("waiting for a package manager"), "{told:?}");
        assert!(!root.path().join("log").exists(), "it was run all the same");
    }
}
