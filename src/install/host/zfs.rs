//! ZFS and the Machine Pool: the module the distribution's way, a limit for its cache, a throw-away pool as proof, and a
//! pool only where there is none. What is there already is read and not done again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Prepared;
use super::distribution::Manager;
use super::packages::{Packages, half_configured};
use super::storage::{PoolOf, Storage, zfs_json};
use crate::command::{CommandError, Run};
use crate::durable::{create_new, make_dir, random_hex, write_whole};
use crate::host::{Account, Host};
use crate::install::admission::Admission;
use crate::install::preflight::Problem;
use crate::install::source::Settings;
use crate::install::units::PLUGIN;
use crate::interrupt::Interrupt;
use crate::storage::{self, Pool, shown_size};
use crate::systemd::Systemd;
use crate::text::printable;

/// How the Machine Pool is called, and the dataset in it whose children are volumes.
pub(super) const POOL: &str = "ployz";
const DATASET: &str = "ployz/volumes";
/// The property that tells a pool of ours from another of the same name.
const MARK: &str = "ployz:machine";
/// What ZFS is asked by.
pub(super) const TOOLS: [&str; 2] = ["zpool", "zfs"];
/// For one call of them, and for loading the module.
const CALL: Duration = Duration::from_secs(60);
/// The throw-away pool, in bytes.
const PROOF: u64 = 128 << 20;
/// The bounds of the cache's limit, in bytes: a quarter of the memory between them.
const ARC: (u64, u64) = (256 << 20, 1 << 30);

/// How ZFS is installed on one distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Distribution {
    id: &'static str,
    pub(super) manager: Manager,
}

/// The row for this host, or what it is instead.
pub(super) fn distribution(host: &Host) -> Result<Distribution, String> {
    let (id, version) = host.os_release();
    let row = |id, manager| Ok(Distribution { id, manager });
    match (id.as_str(), version.as_str()) {
        ("ubuntu", _) => row("ubuntu", Manager::Apt),
        ("debian", "12" | "13") => row("debian", Manager::Apt),
        ("amzn", "2023") => row("amzn", Manager::Dnf),
        _ => Err(format!("{id} {version}").trim().to_owned()),
    }
}

/// What there is of a pool of this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum There {
    None,
    Ours,
    Foreign,
}

fn zpool<'a>(host: &Host, words: &[&str]) -> Run<'a> {
    Run::new(host.tool("zpool"), CALL).args(words)
}

fn zfs<'a>(host: &Host, words: &[&str]) -> Run<'a> {
    Run::new(host.tool("zfs"), CALL).args(words)
}

/// Looks which pool of this name there is; without the module there is none that could be asked.
pub(super) fn there(host: &Host) -> Result<There, Problem> {
    let help = format!("import it: zpool import {POOL}");
    let was = zfs_json(host);
    if !host.root().join("sys/module/zfs").is_dir() || host.find_tool("zpool").is_none() {
        return match was {
            None => Ok(There::None),
            Some(pool) => Err(Problem::new(
                format!("pool {} was prepared here, and the ZFS module is not loaded", pool.pool),
                "load it: modprobe zfs",
            )),
        };
    }
    let unknown =
        |e: CommandError| Problem::new(format!("which pools there are can't be told: {e}"), "zpool list");
    match zfs(host, &["get", "-H", "-o", "value", MARK, POOL]).check() {
        Ok(ended) if ended.stdout.trim_ascii() == b"1" => return Ok(There::Ours),
        Ok(_) => return Ok(There::Foreign),
        Err(CommandError::Status { stderr, .. }) if stderr.contains("does not exist") => {}
        Err(e) => return Err(unknown(e)),
    }
    if was.is_some() {
        return Err(Problem::new(format!("pool {POOL} was prepared here, and is not imported"), help));
    }
    // One that could be imported, on any disk.
    let listed = zpool(host, &["import"]).run().map_err(unknown)?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    if text.lines().any(|line| line.trim().strip_prefix("pool:").is_some_and(|name| name.trim() == POOL)) {
        return Err(Problem::new(
            format!("there is a pool {POOL} on a disk of this host that is not imported"),
            help,
        ));
    }
    Ok(There::None)
}

/// What preparing storage was asked for.
pub(in crate::install) struct Asked<'a> {
    pub(in crate::install) host: &'a Host,
    pub(in crate::install) settings: &'a Settings,
    pub(in crate::install) systemd: Option<Systemd>,
    pub(in crate::install) storage: Option<&'a Storage>,
    pub(in crate::install) interrupt: &'a Interrupt,
}

/// Storage as it was asked for. What fails half-way is gone on with by the next run.
pub(in crate::install) fn prepare(
    asked: &Asked<'_>,
    tell: &mut dyn FnMut(&str),
    _admission: &Admission,
) -> Result<Prepared, String> {
    let mut prepared = Prepared::default();
    let Some(Storage::Zfs(of)) = asked.storage else { return Ok(prepared) };
    let host = asked.host;
    module(asked, tell, &mut prepared)?;
    limit(host, &mut prepared)?;
    let problem = |problem: Problem| format!("{}; {}", problem.what, problem.help);
    let there = there(host).map_err(problem)?;
    if there == There::Foreign {
        return Err(format!("there is a pool {POOL} that was not made by Ployz: it is not used"));
    }
    if there == There::None {
        prove(host)?;
        prepared.done.push("ZFS works here: a throw-away pool was made, seen, destroyed and is gone".into());
        let Some(of) = of else { return Err("there is no Machine Pool to take up".into()) };
        make_pool(host, of, &mut prepared)?;
    } else if of.is_some() && zfs_json(host).is_none() {
        prepared
            .warnings
            .push(format!("the Machine Pool {POOL} that is there was taken up, and nothing was made anew"));
    }
    dataset(host, &mut prepared)?;
    at_boot(asked, &mut prepared);
    let pool = Pool { pool: POOL.into(), dataset: DATASET.into() };
    if zfs_json(host).as_ref() != Some(&pool) {
        let path = host.storage_json();
        make_dir(path.parent().unwrap_or(&path), 0o755)
            .and_then(|()| write_whole(host, &path, &storage::text(&pool), 0o644, Account { uid: 0, gid: 0 }))
            .map_err(|e| format!("writing {}: {e}", path.display()))?;
        prepared.done.push(format!("volumes are datasets in {DATASET}"));
        // One that was started without /dev/zfs may not open it.
        let plugin = asked.systemd.and_then(|systemd| Some((systemd, systemd.show(&[PLUGIN]).ok()?.pop()?)));
        if let Some((systemd, _)) = plugin.filter(|(_, unit)| unit.active == "active") {
            systemd.restart(&[PLUGIN]).map_err(|e| format!("restarting {PLUGIN}: {e}"))?;
        }
    }
    Ok(prepared)
}

fn is_loaded(host: &Host) -> bool {
    host.root().join("sys/module/zfs").is_dir()
}

/// The module and its tools; nothing is installed where they are there.
fn module(asked: &Asked<'_>, tell: &mut dyn FnMut(&str), prepared: &mut Prepared) -> Result<(), String> {
    let host = asked.host;
    let tools = |host: &Host| TOOLS.iter().all(|tool| host.find_tool(tool).is_some());
    let load = || Run::new(host.tool("modprobe"), CALL).args(["zfs"]).check();
    if tools(host) && (is_loaded(host) || load().is_ok() && is_loaded(host)) {
        return Ok(());
    }
    let distribution =
        distribution(host).map_err(|what| format!("how ZFS is installed on {what} is not known"))?;
    if let Some(why) = half_configured(host, distribution.manager) {
        return Err(format!(
            "an installation of packages was cut off here: {why}; finish it: dpkg --configure -a"
        ));
    }
    let release = nix::sys::utsname::uname().map_err(|e| format!("asking for the kernel: {e}"))?;
    let release = release.release().to_string_lossy().into_owned();
    let deadline = asked.settings.deadlines.packages;
    let manager = distribution.manager;
    let mut packages = Packages { host, manager, deadline, interrupt: asked.interrupt, tell };
    packages.refresh()?;
    let names = match distribution.id {
        "ubuntu" => {
            let of_kernel = ["linux-modules-zfs-", "linux-modules-extra-", "linux-modules-"];
            let of_kernel = of_kernel.iter().map(|name| format!("{name}{release}"));
            let has_module = Run::new(host.tool("modinfo"), CALL).args(["-n", "zfs"]).check().is_ok();
            let module =
                if has_module { None } else { of_kernel.into_iter().find(|name| packages.has(name)) };
            if !has_module && module.is_none() {
                return Err(format!(
                    "there is no package with the ZFS module of the running kernel {release}: reboot into the newest one"
                ));
            }
            module.into_iter().chain(["zfsutils-linux".to_owned()]).collect()
        }
        "debian" => {
            let headers = format!("linux-headers-{release}");
            if !packages.has(&headers) {
                return Err(format!(
                    "there is no package {headers}, to build the module against the running kernel: upgrade the kernel and reboot"
                ));
            }
            if !packages.has("zfs-dkms") {
                contrib(host, prepared)?;
                packages.refresh()?;
            }
            vec![headers, "zfs-dkms".into(), "zfsutils-linux".into()]
        }
        _ => vec![format!("kernel-devel-{release}"), "zfs-dkms".into(), "zfs".into()],
    };
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    packages.install(&words)?;
    prepared.done.push(format!("ZFS installed by {}: {}", manager.program(), words.join(", ")));
    match load() {
        Ok(_) if is_loaded(host) && tools(host) => Ok(()),
        Ok(_) => Err("modprobe zfs succeeded, and the module is not there all the same".into()),
        Err(e) => Err(format!("loading the ZFS module: {e}")),
    }
}

/// Adds Debian's component contrib, which has ZFS, from where the host has its other packages.
fn contrib(host: &Host, prepared: &mut Prepared) -> Result<(), String> {
    let sources = host.root().join("etc/apt/sources.list.d");
    let path = sources.join("ployz-contrib.sources");
    let text = ["etc/apt/sources.list.d/debian.sources", "etc/apt/sources.list"]
        .iter()
        .find_map(|file| contrib_source(&fs::read_to_string(host.root().join(file)).ok()?))
        .ok_or("the host's package sources name no Debian archive to take ZFS (component contrib) from")?;
    make_dir(&sources, 0o755)
        .and_then(|()| write_whole(host, &path, text.as_bytes(), 0o644, Account { uid: 0, gid: 0 }))
        .map_err(|e| format!("writing {}: {e}", path.display()))?;
    prepared.done.push(format!("{} written: ZFS is in Debian's contrib", path.display()));
    Ok(())
}

/// The same archive with the component contrib: of the first source that has main, in either of apt's two forms.
fn contrib_source(text: &str) -> Option<String> {
    let head = "# ZFS is in contrib. Written by ployzd install --storage zfs.\nTypes: deb\n";
    for stanza in text.split("\n\n") {
        let field = |name: &str| {
            stanza
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(|value| value.trim().to_owned())
        };
        let (Some(types), Some(uris), Some(suites)) = (field("Types"), field("URIs"), field("Suites")) else {
            continue;
        };
        let has_main = field("Components").is_some_and(|all| all.split_whitespace().any(|one| one == "main"));
        if !has_main
            || !types.split_whitespace().any(|kind| kind == "deb")
            || field("Enabled").as_deref() == Some("no")
        {
            continue;
        }
        let signed = field("Signed-By").map(|key| format!("Signed-By: {key}\n")).unwrap_or_default();
        return Some(format!("{head}URIs: {uris}\nSuites: {suites}\nComponents: contrib\n{signed}"));
    }
    let line = text.lines().find(|line| {
        line.starts_with("deb ") && line.split_whitespace().skip(3).any(|component| component == "main")
    })?;
    let (options, rest) = match line.strip_prefix("deb ")?.trim_start().strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", line.strip_prefix("deb ")?),
    };
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    let signed = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    let signed = signed.map(|key| format!("Signed-By: {key}\n")).unwrap_or_default();
    Some(format!("{head}URIs: {uri}\nSuites: {suite}\nComponents: contrib\n{signed}"))
}

/// The limit of ZFS's cache for so much memory, in bytes.
fn arc(memory: u64) -> u64 {
    (memory / 4).clamp(ARC.0, ARC.1)
}

/// Limits the cache, now and from the next boot on, where nobody else has.
fn limit(host: &Host, prepared: &mut Prepared) -> Result<(), String> {
    let dir = host.root().join("etc/modprobe.d");
    let (path, live) =
        (dir.join("ployz-zfs.conf"), host.root().join("sys/module/zfs/parameters/zfs_arc_max"));
    let others = fs::read_dir(&dir).into_iter().flatten().flatten().filter(|entry| entry.path() != path);
    let other = others.map(|entry| entry.path()).find(|path| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains("zfs_arc_max"))
    });
    if let Some(other) = other {
        prepared.warnings.push(format!("the limit of ZFS's cache is that of {}", other.display()));
        return Ok(());
    }
    let memory = fs::read_to_string(host.root().join("proc/meminfo")).unwrap_or_default();
    let memory = memory.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let limit = arc(memory.unwrap_or(0) << 10);
    let text = format!(
        "# A quarter of the memory, at least 256 MiB and at most 1 GiB.\noptions zfs zfs_arc_max={limit}\n"
    );
    if fs::read_to_string(&path).ok().as_ref() != Some(&text) {
        make_dir(&dir, 0o755)
            .and_then(|()| write_whole(host, &path, text.as_bytes(), 0o644, Account { uid: 0, gid: 0 }))
            .map_err(|e| format!("writing {}: {e}", path.display()))?;
        prepared.done.push(format!("ZFS's cache has at most {}", shown_size(limit)));
    }
    let now = || fs::read_to_string(&live).unwrap_or_default().trim().parse::<u64>().ok();
    if now() != Some(limit) {
        fs::write(&live, limit.to_string()).map_err(|e| format!("limiting ZFS's cache: {e}"))?;
        if now() != Some(limit) {
            let is = now().unwrap_or_default();
            return Err(format!(
                "ZFS's cache was limited to {limit} bytes, and {} says {is}",
                live.display()
            ));
        }
    }
    Ok(())
}

/// Makes a throw-away pool, sees it, destroys it, and sees that it is gone before its file is.
fn prove(host: &Host) -> Result<(), String> {
    let random = random_hex(4).map_err(|e| e.to_string())?;
    let (name, file) = (format!("ployz-proof-{random}"), host.lib().join(format!("zfs-proof-{random}.img")));
    let text = file.to_string_lossy().into_owned();
    let proved = (|| {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |e: CommandError| format!("{what}: {e}")
        };
        make_dir(&host.lib(), 0o755)
            .and_then(|()| create_new(&file)?.set_len(PROOF))
            .map_err(|e| format!("making {text}: {e}"))?;
        let words = ["create", "-o", "cachefile=none", "-m", "none", &name, &text];
        zpool(host, &words).check().map_err(failed("ZFS does not work here: making a throw-away pool"))?;
        let health = zpool(host, &["list", "-H", "-o", "health", &name]).check();
        let destroyed = zpool(host, &["destroy", &name]).check();
        let health = health.map_err(failed("ZFS does not work here: looking at a throw-away pool"))?;
        destroyed.map_err(failed("ZFS does not work here: destroying a throw-away pool"))?;
        let said = printable(&String::from_utf8_lossy(&health.stdout));
        if said != "ONLINE" {
            return Err(format!("ZFS does not work here: a throw-away pool is {said}"));
        }
        match zpool(host, &["list", "-H", &name]).run() {
            Ok(ended) if ended.status.success() => Err(format!(
                "the throw-away pool {name} was destroyed, and is there all the same: zpool destroy {name}"
            )),
            _ => Ok(()),
        }
    })();
    if proved.is_ok() || zpool(host, &["list", "-H", &name]).run().is_ok_and(|ended| !ended.status.success())
    {
        let _ = fs::remove_file(&file);
    }
    proved
}

/// The file of a pool that is made of one.
pub(super) fn file(host: &Host) -> PathBuf {
    host.root().join("var/lib/ployz-pool/pool.img")
}

/// The name of a device that it keeps, wherever it is plugged in.
fn by_id(device: &Path) -> PathBuf {
    let Ok(real) = fs::canonicalize(device) else { return device.to_owned() };
    let mut names: Vec<PathBuf> = fs::read_dir("/dev/disk/by-id")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| fs::canonicalize(path).is_ok_and(|target| target == real))
        .collect();
    names.sort_by_key(|path| (path.to_string_lossy().contains("/wwn-"), path.clone()));
    names.into_iter().next().unwrap_or_else(|| device.to_owned())
}

/// Makes the Machine Pool. Never by force: zpool looks once more for what is on the device.
fn make_pool(host: &Host, of: &PoolOf, prepared: &mut Prepared) -> Result<(), String> {
    let vdev = match of {
        PoolOf::Device(path) => by_id(path),
        PoolOf::File(size) => {
            let path = file(host);
            let made = make_dir(path.parent().unwrap_or(&path), 0o700).and_then(|()| {
                let file = create_new(&path)?;
                let length = i64::try_from(*size).map_err(std::io::Error::other)?;
                // All of it now: a pool whose file finds no room later is a broken one.
                nix::fcntl::posix_fallocate(&file, 0, length)?;
                file.sync_all()
            });
            if let Err(e) = made {
                let _ = fs::remove_file(&path);
                return Err(format!("making {}: {e}", path.display()));
            }
            path
        }
    };
    let shown = vdev.to_string_lossy().into_owned();
    let mark = format!("{MARK}=1");
    let words = [
        "create",
        "-o",
        "ashift=12",
        "-O",
        "compression=lz4",
        "-O",
        "atime=off",
        "-O",
        "xattr=sa",
        "-O",
        "acltype=posixacl",
        "-O",
        &mark,
        "-m",
        "none",
        POOL,
        &shown,
    ];
    if let Err(e) = zpool(host, &words).check() {
        if matches!(of, PoolOf::File(_)) {
            let _ = fs::remove_file(&vdev);
        }
        return Err(format!("making pool {POOL} of {shown}: {e}"));
    }
    if there(host) != Ok(There::Ours) {
        return Err(format!("zpool create succeeded, and there is no pool {POOL} all the same"));
    }
    prepared.done.push(format!("pool {POOL} made of {shown}"));
    Ok(())
}

/// The dataset whose children are volumes.
fn dataset(host: &Host, prepared: &mut Prepared) -> Result<(), String> {
    let there =
        || zfs(host, &["list", "-H", "-o", "name", DATASET]).run().is_ok_and(|ended| ended.status.success());
    if there() {
        return Ok(());
    }
    zfs(host, &["create", "-o", "mountpoint=none", DATASET])
        .check()
        .map_err(|e| format!("making {DATASET}: {e}"))?;
    if !there() {
        return Err(format!("zfs create succeeded, and there is no {DATASET} all the same"));
    }
    prepared.done.push(format!("dataset {DATASET} made"));
    Ok(())
}

/// What imports pools at boot, as far as the distribution has it.
fn at_boot(asked: &Asked<'_>, prepared: &mut Prepared) {
    let units = ["zfs-import-cache.service", "zfs-import.target", "zfs.target"];
    let Some(systemd) = asked.systemd else { return };
    let shown = systemd.show(&units).unwrap_or_default();
    let off: Vec<&str> = units
        .iter()
        .zip(&shown)
        .filter(|(_, unit)| unit.load == "loaded" && unit.file_state == "disabled")
        .map(|(name, _)| *name)
        .collect();
    if !off.is_empty() {
        match systemd.enable(&off) {
            Ok(()) => prepared.done.push(format!("{} enabled, to import the pool at boot", off.join(", "))),
            Err(e) => prepared.warnings.push(format!("the pool may not be imported at boot: {e}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contrib_is_taken_from_where_main_is() {
        let new = "Types: deb-src\nURIs: http://a.test\nSuites: x\nComponents: main\n\nTypes: deb deb-src\n\
                   URIs: http://b.test/debian\nSuites: trixie trixie-updates\nComponents: main non-free-firmware\n\
                   Signed-By: /usr/share/keyrings/debian.pgp\n";
        let source = contrib_source(new).unwrap_or_default();
        assert!(source.ends_with(
            "Types: deb\nURIs: http://b.test/debian\nSuites: trixie trixie-updates\nComponents: contrib\n\
             Signed-By: /usr/share/keyrings/debian.pgp\n"
        ));
        let old = "# deb http://a.test x main\ndeb [arch=amd64 signed-by=/k.gpg] http://c.test/debian bookworm main\n";
        let source = contrib_source(old).unwrap_or_default();
        assert!(
            source.contains("URIs: http://c.test/debian\nSuites: bookworm\n")
                && source.contains("Signed-By: /k.gpg\n")
        );
        assert_eq!(contrib_source("deb http://d.test x contrib\n"), None);
        assert_eq!(contrib_source(""), None);
    }

    #[test]
    fn the_cache_has_a_quarter_of_the_memory_within_bounds() {
        assert_eq!(arc(0), 256 << 20);
        assert_eq!(arc(2 << 30), 512 << 20);
        assert_eq!(arc(64 << 30), 1 << 30);
    }
}
