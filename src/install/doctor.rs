//! The doctor: one table of checks that only look. Each says what it saw, what is wrong with that and what to type, or
//! that it could not look. Preflight is the part of it that stands in the way of an installation.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::admission::{Observed, describe};
use super::attempt::State;
use super::fetch;
use super::host as prepare;
use super::installed::{Docker as Choice, Inventory};
use super::preflight::{self, Problem};
use super::release::Channel;
use super::source::Settings;
use super::status::{self, Status};
use super::units::{self, PLUGIN, PLUGIN_SOCKET, Unit};
use crate::command::{CommandError, Run};
use crate::docker::{DockerError, engine_now};
use crate::durable::sha256_file;
use crate::host::{Host, architecture};
use crate::interrupt::Interrupt;
use crate::storage::{self, Backend};
use crate::systemd::Systemd;
use crate::text::printable;

/// For one call of systemctl.
const SYSTEMCTL: Duration = Duration::from_secs(10);
/// For the release source: a look is not worth a longer wait.
const SOURCE: Duration = Duration::from_secs(10);
/// The oldest systemd that is used.
const SYSTEMD: u32 = 252;
/// What systemd may say of the exposure of a unit: the budget of hardening/README.md.
const EXPOSURE: [(&str, f32); 4] = [
    ("ployz.service", 1.3),
    ("ployz-upgrade@doctor.service", 2.8),
    ("ployz-deploy@doctor.service", 1.3),
    ("ployz-volume-plugin.service", 2.2),
];

/// What a check came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum Found {
    /// As it should be.
    Ok {
        /// What was seen.
        seen: String,
    },
    /// Something is wrong.
    Finding {
        /// What was seen.
        seen: String,
        /// What to type, a line each.
        help: Vec<String>,
    },
    /// It could not be looked at.
    Unknown {
        /// Why.
        seen: String,
    },
}

/// One check, made.
#[derive(Debug, Clone, Serialize)]
pub struct Checked {
    /// Its name.
    pub name: &'static str,
    /// What it came to.
    #[serde(flatten)]
    pub found: Found,
}

type Check = fn(&Look<'_>) -> Found;

/// Every check, in the order in which they are shown.
const CHECKS: [(&str, Check); 17] = [
    ("systemd", systemd),
    ("architecture", processor),
    ("filesystems", filesystems),
    ("settings", settings),
    ("source", source),
    ("clock", clock),
    ("accounts", accounts),
    ("owners", owners),
    ("units", unit_files),
    ("effective units", effective_units),
    ("daemon", daemon),
    ("previous", previous),
    ("admission", admission),
    ("last attempt", last_attempt),
    ("docker", docker),
    ("storage", storage),
    ("sandbox", sandbox),
];

/// What checks look at.
struct Look<'a> {
    host: &'a Host,
    systemd: Option<Systemd>,
    status: Status,
    inventory: Inventory,
    settings: Result<Settings, String>,
    /// The units of the installed release, where it could be asked.
    units: Result<Vec<Unit>, String>,
    interrupt: &'a Interrupt,
}

/// Makes every check. Changes nothing, takes no lock, and starts nothing that was stopped.
pub fn doctor(host: &Host, interrupt: &Interrupt, tell: &mut dyn FnMut(&Checked)) -> Vec<Checked> {
    let (inventory, _) = Inventory::read(host);
    let look = Look {
        host,
        systemd: host.systemd_runs().then(|| Systemd::new(SYSTEMCTL)),
        status: status::status(host),
        inventory,
        settings: Settings::read(host).map_err(|e| e.to_string()),
        units: installed_units(host, interrupt),
        interrupt,
    };
    let made = CHECKS.iter().map(|(name, check)| {
        let checked = Checked { name, found: check(&look) };
        tell(&checked);
        checked
    });
    made.collect()
}

fn ok(seen: impl Into<String>) -> Found {
    Found::Ok { seen: seen.into() }
}

fn finding(seen: impl Into<String>, help: impl Into<String>) -> Found {
    Found::Finding { seen: seen.into(), help: vec![help.into()] }
}

fn unknown(why: impl Into<String>) -> Found {
    Found::Unknown { seen: why.into() }
}

/// All problems at once, or what was seen where there are none.
fn none_of(problems: Vec<Problem>, seen: impl Into<String>) -> Found {
    if problems.is_empty() {
        return ok(seen);
    }
    let (seen, help): (Vec<_>, Vec<_>) =
        problems.into_iter().map(|problem| (problem.what, problem.help)).unzip();
    Found::Finding { seen: seen.join("; "), help }
}

fn no_systemd() -> Found {
    unknown("systemd is not PID 1 here")
}

/// The units that the installed release brings: by itself where it is this one.
fn installed_units(host: &Host, interrupt: &Interrupt) -> Result<Vec<Unit>, String> {
    let installed = host.installed();
    let digest = |path: &Path| sha256_file(path).map_err(|e| format!("reading {}: {e}", path.display()));
    if digest(host.program())? == digest(&installed)? {
        return Ok(units::shipped());
    }
    match units::ask(host, &installed, SYSTEMCTL, interrupt)? {
        Some(units) => Ok(units),
        None => Err("the installed release is too old to describe its units".into()),
    }
}

fn systemd(look: &Look<'_>) -> Found {
    let Some(systemd) = look.systemd else {
        return finding("systemd is not PID 1 here", "a Machine needs systemd: ps -p 1");
    };
    match systemd.version() {
        Ok(version) if version >= SYSTEMD => ok(format!("{version}, and PID 1")),
        Ok(version) => finding(
            format!("{version}, and {SYSTEMD} is the oldest that is used"),
            "upgrade the host's systemd as part of its own maintenance",
        ),
        Err(e) => unknown(e.to_string()),
    }
}

fn processor(_look: &Look<'_>) -> Found {
    match architecture() {
        Some(name) => ok(format!("{} ({name})", std::env::consts::ARCH)),
        None => {
            finding(format!("there is no release for {}", std::env::consts::ARCH), "use x86_64 or aarch64")
        }
    }
}

fn filesystems(look: &Look<'_>) -> Found {
    let host = look.host;
    let mut problems: Vec<Problem> = [host.bin(), host.lib(), host.units()]
        .iter()
        .flat_map(|dir| preflight::filesystem_problems(dir, 0))
        .collect();
    problems.extend([host.bin(), host.units()].iter().filter_map(|dir| preflight::boot_problem(host, dir)));
    problems.dedup();
    none_of(problems, "writable, executable, with room, there at boot")
}

fn settings(look: &Look<'_>) -> Found {
    let path = look.host.settings();
    match &look.settings {
        Ok(_) if path.exists() => ok(format!("{} is valid", path.display())),
        Ok(_) => ok("the published source; nothing is set"),
        Err(e) => finding(e.clone(), "correct the file, or remove it to use the published source"),
    }
}

fn source(look: &Look<'_>) -> Found {
    let Ok(settings) = &look.settings else { return unknown("the settings are not valid") };
    let mut settings = settings.clone();
    settings.deadlines.pointer = settings.deadlines.pointer.min(SOURCE);
    let major = look.inventory.current.as_ref().map_or(1, |current| current.version.major);
    let url = settings.pointer_url(major, Channel::Stable);
    let proxy = settings
        .proxy
        .as_deref()
        .map(|proxy| format!(", through {}", without_user(proxy)))
        .unwrap_or_default();
    match fetch::fetch_small(look.host, &settings, &url, 4096, look.interrupt) {
        Ok(pointer) => {
            let text = String::from_utf8_lossy(&pointer).trim().chars().take(40).collect::<String>();
            ok(format!("{url} says {}{proxy}", crate::text::printable(&text)))
        }
        Err(e) => {
            finding(format!("{e}{proxy}"), "look at proxy, ca_file and channels in /etc/ployz/install.json")
        }
    }
}

/// A proxy's address without the name and password that may be in it.
fn without_user(proxy: &str) -> String {
    match (proxy.split_once("://"), proxy.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        (None, Some((_, host))) => host.to_owned(),
        (_, None) => proxy.to_owned(),
    }
}

/// A clock that is behind what was written by it is wrong; whether it is right otherwise, systemd says.
fn clock(look: &Look<'_>) -> Found {
    let written = [&look.inventory.current, &look.inventory.previous];
    let latest = written.into_iter().flatten().filter_map(|i| i.confirmed_at.or(Some(i.installed_at))).max();
    let now = Timestamp::now();
    if let Some(latest) = latest.filter(|latest| *latest > now) {
        return finding(
            format!("it is {now}, which is before the last installation ({latest})"),
            "set it: timedatectl set-ntp true; timedatectl",
        );
    }
    let shown = Run::new("timedatectl", SYSTEMCTL).args(["show", "-p", "NTPSynchronized", "--value"]).run();
    match shown {
        Ok(ended) if ended.stdout.trim_ascii() == b"yes" => ok("kept by NTP"),
        Ok(_) => ok("not before the last installation; not kept by NTP"),
        Err(e) => unknown(e.to_string()),
    }
}

fn accounts(look: &Look<'_>) -> Found {
    let host = look.host;
    let help = "let install make them: sudo /usr/local/bin/ployzd install";
    let mut problems: Vec<Problem> = prepare::missing(host)
        .into_iter()
        .map(|what| Problem::new(format!("there is no {what}"), help))
        .collect();
    problems.extend(prepare::foreign_accounts(host));
    let in_docker = host.members("docker").iter().any(|member| member == "ployz-deploy");
    if look.inventory.docker == Choice::Auto && host.group("docker").is_some() && !in_docker {
        problems.push(Problem::new("ployz-deploy is not in group docker: services can't be deployed", help));
    }
    none_of(problems, "ployz, ployz-fetch, ployz-deploy, ployz-admission")
}

fn owners(look: &Look<'_>) -> Found {
    let host = look.host;
    let mut problems = preflight::owner_problems(host);
    for path in [host.installed(), host.previous()] {
        if let Some(what) = crate::durable::writable_by_others(&path) {
            problems.push(Problem::new(what, format!("look at what it is: ls -la {}", path.display())));
        }
    }
    none_of(problems, "root's, and nobody else's to change")
}

/// Unit files on disk against those of the installed release.
fn unit_files(look: &Look<'_>) -> Found {
    let host = look.host;
    let units = match &look.units {
        Ok(units) => units,
        Err(e) => return unknown(e.clone()),
    };
    let mut problems: Vec<Problem> = units::differing(host, units)
        .into_iter()
        .map(|unit| {
            let path = host.unit(&unit.name);
            let what = match std::fs::read_to_string(&path) {
                Ok(found) => format!(
                    "{} is not what the release brings: {}",
                    unit.name,
                    first_difference(&unit.content, &found)
                ),
                Err(e) => format!("{} can't be read: {e}", path.display()),
            };
            Problem::new(what, "put it right: sudo /usr/local/bin/ployzd install")
        })
        .collect();
    let disabled = look.status.process.iter().flat_map(|process| &process.not_enabled);
    problems.extend(disabled.map(|name| {
        Problem::new(
            format!("{name} is disabled: it does not start at boot"),
            format!("systemctl enable {name}"),
        )
    }));
    none_of(problems, format!("{} files as the release brings them", units.len()))
}

/// The first line in which two texts differ.
fn first_difference(expected: &str, found: &str) -> String {
    let (mut expected, mut found) = (expected.lines(), found.lines());
    loop {
        match (expected.next(), found.next()) {
            (a, b) if a == b && a.is_some() => {}
            (None, None) => return "only in how its lines end".into(),
            (a, b) => {
                let shown = |line: Option<&str>| {
                    line.map_or_else(
                        || "no more lines".into(),
                        |line| format!("{:?}", line.chars().take(80).collect::<String>()),
                    )
                };
                return format!("{} instead of {}", shown(b), shown(a));
            }
        }
    }
}

/// What systemd does with them: masks, overrides, files in their place.
fn effective_units(look: &Look<'_>) -> Found {
    let Some(systemd) = look.systemd else { return no_systemd() };
    let units = look.units.clone().unwrap_or_else(|_| units::shipped());
    none_of(preflight::unit_problems(look.host, systemd, &units), "nothing is masked or overridden")
}

fn daemon(look: &Look<'_>) -> Found {
    let status = &look.status;
    let repair = "sudo /usr/local/bin/ployzd install; to see why: journalctl -u ployz.service -n 20";
    let process = match &status.process {
        Ok(process) => process,
        Err(e) => return unknown(e.clone()),
    };
    if let Some(name) = process.closed.first() {
        return finding(format!("{name} is closed"), format!("systemctl start {name}"));
    }
    if process.state != "active" {
        return finding(
            format!("it is {}", process.state),
            "systemctl start ployz.service, or repair it: sudo /usr/local/bin/ployzd install",
        );
    }
    let api = match &status.api {
        Ok(api) => api,
        Err(e) => return if host_is_root(look) { finding(e.clone(), repair) } else { unknown(e.clone()) },
    };
    let digest = api["executable_sha256"].as_str();
    let in_place =
        status.installed.as_ref().ok().and_then(Option::as_ref).map(|on_disk| on_disk.sha256.as_str());
    if process.runs_installed == Some(false) || (digest.is_some() && in_place.is_some() && digest != in_place)
    {
        return finding("it does not run the installed file", repair);
    }
    if api["ready"] != true {
        let problems = api["problems"].as_array().into_iter().flatten().filter_map(Value::as_str);
        return finding(format!("it is not ready: {}", problems.collect::<Vec<_>>().join("; ")), repair);
    }
    ok(format!(
        "{} runs the installed file (pid {}), ready",
        api["version"].as_str().unwrap_or("?"),
        process.pid.unwrap_or_default()
    ))
}

fn host_is_root(look: &Look<'_>) -> bool {
    look.host.privileged()
}

fn previous(look: &Look<'_>) -> Found {
    let host = look.host;
    match &look.status.previous {
        Ok(None) => return ok("none is retained yet"),
        Err(e) => return unknown(e.clone()),
        Ok(Some(_)) => {}
    }
    if !host.privileged() {
        return unknown("whether it runs is seen by root: sudo /usr/local/bin/ployzd doctor");
    }
    match preflight::ask_version(host, &host.previous(), SYSTEMCTL, look.interrupt) {
        Ok(about) => ok(format!("{} runs here", about.version)),
        Err(refused) => finding(
            format!("the retained binary can't be put back: {}", refused.error),
            "install a release that is known to work, then another: sudo /usr/local/bin/ployzd install --version X.Y.Z",
        ),
    }
}

fn admission(look: &Look<'_>) -> Found {
    match &look.status.admission {
        Observed::Free => ok("free"),
        Observed::Unknown { why } => unknown(why.clone()),
        held => ok(describe(held)),
    }
}

fn last_attempt(look: &Look<'_>) -> Found {
    let seen = match &look.status.last {
        Ok(None) => return ok("no attempt is recorded"),
        Ok(Some(seen)) => seen,
        Err(e) if !host_is_root(look) => return unknown(format!("{e}: root sees it")),
        Err(e) => return finding(e.clone(), "look at: ls -la /var/lib/ployz-install/attempts"),
    };
    let text = |field: &str| seen.record[field].as_str().unwrap_or("?");
    let what = format!("{} {}", text("kind"), text("target"));
    match &seen.state {
        State::Running => ok(format!("{what} is running, at {}", text("stage"))),
        State::Unknown { why } => unknown(why.clone()),
        State::Interrupted { evidence } => finding(
            format!(
                "{what} was interrupted at {}, installation {}: {evidence}",
                text("stage"),
                text("installation")
            ),
            "see what is so now, then go on: ployzd status; sudo /usr/local/bin/ployzd install",
        ),
        State::Ended => match seen.record["outcome"].as_object().and_then(|outcome| outcome.iter().next()) {
            Some((kind, _)) if kind == "succeeded" || kind == "installed" => ok(format!("{what} {kind}")),
            Some((kind, detail)) => {
                let why = detail["error"].as_str().or(detail["evidence"].as_str()).unwrap_or("?");
                finding(
                    format!("{what} {kind}: {why}"),
                    format!("see all of it: ployzd attempt {}", text("id")),
                )
            }
            None => unknown("it ended in a way that this release does not know"),
        },
    }
}

fn docker(look: &Look<'_>) -> Found {
    if look.inventory.docker == Choice::None {
        return ok("this Machine does without (--docker none)");
    }
    let host = look.host;
    let stopped =
        look.systemd.and_then(|systemd| systemd.show(&["docker.service"]).ok()).is_some_and(|shown| {
            shown.first().is_some_and(|unit| unit.load == "loaded" && unit.active != "active")
        });
    if stopped {
        return finding("it is installed and not running", "systemctl start docker.service");
    }
    match engine_now(host.docker()) {
        Ok(engine) if engine.containerd_store => {
            let restore = if engine.live_restore {
                "live-restore"
            } else {
                "no live-restore: containers end when it is restarted"
            };
            ok(format!("{}, API {}, containerd's image store, {restore}", engine.version, engine.api))
        }
        Ok(engine) => finding(
            format!("{} keeps images in its own store ({})", engine.version, engine.driver),
            "switch it as part of the host's maintenance: features.containerd-snapshotter in /etc/docker/daemon.json",
        ),
        Err(DockerError::NotPermitted(_)) => {
            unknown("who may not ask Docker can't see it: sudo /usr/local/bin/ployzd doctor")
        }
        Err(e) => finding(e.to_string(), e.help()),
    }
}

fn storage(look: &Look<'_>) -> Found {
    let host = look.host;
    let backend = match storage::read(host) {
        Ok(backend) => backend,
        Err(why) => {
            return finding(why, "prepare it again, which changes no pool: ployzd install --storage zfs");
        }
    };
    let shown = look.systemd.and_then(|systemd| systemd.show(&[PLUGIN_SOCKET, PLUGIN]).ok());
    for unit in shown.into_iter().flatten().zip([PLUGIN_SOCKET, PLUGIN]) {
        let (unit, name) = unit;
        if unit.load == "loaded" && unit.active != "active" {
            return finding(format!("{name} is {}", unit.active), format!("systemctl start {name}"));
        }
    }
    let Backend::Zfs(pool) = backend else { return ok("volumes are directories of this host's filesystem") };
    if !host.root().join("sys/module/zfs").is_dir() {
        return finding("the ZFS module is not loaded", "modprobe zfs; what it says tells why it can't be");
    }
    let ask = |program: &str, words: &[&str]| Run::new(host.tool(program), SYSTEMCTL).args(words).check();
    let health = match ask("zpool", &["list", "-H", "-o", "health", &pool.pool]) {
        Ok(ended) => printable(&String::from_utf8_lossy(&ended.stdout)),
        Err(CommandError::Status { stderr, .. }) if stderr.contains("no such pool") => {
            let what = format!("pool {} is not imported", pool.pool);
            return finding(what, format!("zpool import {}", pool.pool));
        }
        Err(e) => return unknown(e.to_string()),
    };
    if health != "ONLINE" {
        return finding(format!("pool {} is {health}", pool.pool), format!("zpool status {}", pool.pool));
    }
    match ask("zfs", &["list", "-H", "-o", "used,available", &pool.dataset]) {
        Ok(ended) => {
            let text = String::from_utf8_lossy(&ended.stdout).into_owned();
            let mut fields = text.split_whitespace();
            let (used, left) = (fields.next().unwrap_or("?"), fields.next().unwrap_or("?"));
            ok(format!(
                "volumes are in {}: {used} used, {left} left; pool {} is {health}",
                pool.dataset, pool.pool
            ))
        }
        Err(e) => finding(
            format!("dataset {} can't be seen: {e}", pool.dataset),
            "prepare it again, which changes no pool: ployzd install --storage zfs",
        ),
    }
}

/// What systemd says of our units' exposure, against the budget.
fn sandbox(look: &Look<'_>) -> Found {
    if look.systemd.is_none() {
        return no_systemd();
    }
    let (mut seen, mut over) = (Vec::new(), Vec::new());
    for (unit, budget) in EXPOSURE {
        let run = Run::new("systemd-analyze", SYSTEMCTL)
            .args(["security", "--no-pager", unit])
            .most_output(256 * 1024);
        let text = match run.run() {
            Ok(ended) => String::from_utf8_lossy(&ended.stdout).into_owned(),
            Err(e) => return unknown(e.to_string()),
        };
        let level = text.lines().rev().find_map(|line| {
            line.split("exposure level for ")
                .nth(1)?
                .split(": ")
                .nth(1)?
                .split(' ')
                .next()?
                .parse::<f32>()
                .ok()
        });
        let Some(level) = level else { return unknown(format!("systemd-analyze says nothing of {unit}")) };
        let name = unit.replace("@doctor", "@");
        seen.push(format!("{name} {level}"));
        if level > budget {
            over.push(Problem::new(
                format!("{name} is exposed at {level}, and {budget} is its budget: something loosens it"),
                format!("see what: systemctl cat {unit}; systemctl revert {unit}"),
            ));
        }
    }
    none_of(over, seen.join(", "))
}

#[cfg(test)]
mod tests {
    use super::{first_difference, without_user};

    #[test]
    fn the_password_of_a_proxy_is_not_shown() {
        assert_eq!(without_user("http://me:secret@proxy.test:3128"), "http://proxy.test:3128");
        assert_eq!(without_user("http://me:se@cret@proxy.test"), "http://proxy.test");
        assert_eq!(without_user("http://proxy.test:3128"), "http://proxy.test:3128");
    }

    #[test]
    fn the_first_line_that_differs_is_shown() {
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), "\"c\" instead of \"b\"");
        assert_eq!(first_difference("a\nb\n", "a\n"), "no more lines instead of \"b\"");
        assert_eq!(first_difference("a\n", "a"), "only in how its lines end");
    }
}
