//! Preparing the host: accounts, groups, directories and Docker; only when an installation was asked to.

mod daemon_json;
mod distribution;
pub(super) mod docker;
mod packages;
pub(super) mod storage;
pub(super) mod zfs;

use std::path::Path;
use std::time::Duration;

use super::admission::Admission;
use super::installed::Docker;
use super::preflight::Problem;
use super::records;
use super::release::Version;
use super::units::{self, SYSUSERS};
use crate::command::Run;
use crate::durable::{make_dir, read_bounded, write_whole};
use crate::host::{Account, Host};

/// The accounts that the daemon's unit, the deploy worker's and untrusted children run as.
const USERS: [&str; 3] = ["ployz", "ployz-fetch", "ployz-deploy"];
const GROUPS: [&str; 4] = ["ployz", "ployz-fetch", "ployz-deploy", "ployz-admission"];

/// What preparing did, for people.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    /// What was made or changed, a line each.
    pub(crate) done: Vec<String>,
    /// What is worth knowing.
    pub(crate) warnings: Vec<String>,
}

/// Declares the accounts and makes those that are missing.
pub(crate) fn accounts(host: &Host, deadline: Duration, _admission: &Admission) -> Result<Prepared, String> {
    let mut prepared = Prepared::default();
    let path = host.sysusers();
    if read_bounded(&path, SYSUSERS.len()).ok().as_deref() != Some(SYSUSERS.as_bytes()) {
        make_dir(path.parent().unwrap_or(&path), 0o755)
            .map_err(|e| format!("making the directory of {path:?}: {e}"))?;
        write_whole(host, &path, SYSUSERS.as_bytes(), 0o644, Account { uid: 0, gid: 0 })
            .map_err(|e| format!("writing {path:?}: {e}"))?;
    }
    let missing = missing(host);
    if missing.is_empty() || !host.privileged() {
        return Ok(prepared);
    }
    Run::new("systemd-sysusers", deadline).args([&path]).check().map_err(|e| e.to_string())?;
    let still = self::missing(host);
    if !still.is_empty() {
        return Err(format!(
            "systemd-sysusers succeeded, and there is no {} all the same",
            still.join(", no ")
        ));
    }
    prepared.done.push(format!("{} created", missing.join(", ")));
    Ok(prepared)
}

/// Groups whose members are root by another name.
const ROOT_BY_ANOTHER_NAME: [&str; 9] =
    ["root", "sudo", "wheel", "admin", "docker", "disk", "shadow", "lxd", "incus"];

/// Accounts of our names that are somebody else's: what runs as them would not be the nobody that it should be.
pub(super) fn foreign_accounts(host: &Host) -> Vec<Problem> {
    let mut problems = Vec::new();
    for name in USERS {
        let Some(account) = host.account(name) else { continue };
        let mut refuse = |what: String, help: String| problems.push(Problem::new(what, help));
        if account.uid == 0 {
            refuse(
                format!("user {name} is root (uid 0)"),
                format!("give the account another name: usermod -l NAME {name}"),
            );
        }
        let shell = host.shell(name).unwrap_or_default();
        if !["nologin", "false"].iter().any(|none| shell.ends_with(none)) {
            refuse(
                format!("user {name} exists with login shell {shell:?}: it is a person's"),
                format!("give it another name, or no shell: usermod -s /usr/sbin/nologin {name}"),
            );
        }
        for group in
            host.groups_of(name).iter().filter(|group| ROOT_BY_ANOTHER_NAME.contains(&group.as_str()))
        {
            if (name, group.as_str()) != ("ployz-deploy", "docker") {
                refuse(
                    format!("user {name} is in group {group}"),
                    format!("take it out: gpasswd -d {name} {group}"),
                );
            }
        }
    }
    problems
}

/// Users and groups that are not there: `user ployz`.
pub(super) fn missing(host: &Host) -> Vec<String> {
    let users = USERS.iter().filter(|name| host.account(name).is_none()).map(|name| format!("user {name}"));
    let groups = GROUPS.iter().filter(|name| host.group(name).is_none() && !USERS.contains(name));
    users.chain(groups.map(|name| format!("group {name}"))).collect()
}

/// Users and groups of ours that are there: `user ployz`, `group ployz`.
pub(super) fn ours(host: &Host) -> Vec<String> {
    let users = USERS.iter().filter(|name| host.account(name).is_some()).map(|name| format!("user {name}"));
    let groups = GROUPS.iter().filter(|name| host.group(name).is_some()).map(|name| format!("group {name}"));
    users.chain(groups).collect()
}

/// Gives the daemon its state directory, and readers of admission and attempts their groups. Owners and modes of what
/// is inside are not touched.
pub(crate) fn directories(host: &Host, admission: &Admission) -> Result<(), String> {
    let state = host.state();
    let made = !state.exists();
    make_dir(&state, 0o750).map_err(|e| format!("making {state:?}: {e}"))?;
    if let Some(account) = host.account("ployz").filter(|_| made) {
        own_dir(host, &state, account, 0o750)?;
    }
    share_records(host, admission)
}

/// Repairs who may read admission and attempts, once the groups exist.
pub(crate) fn share_records(host: &Host, admission: &Admission) -> Result<(), String> {
    admission.share(host).map_err(|e| format!("sharing {:?}: {e}", host.admission()))?;
    records::share(host).map_err(|e| format!("setting the owner of {:?}: {e}", host.attempts()))
}

fn own_dir(host: &Host, path: &Path, owner: Account, mode: u32) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::File::open(path)
        .and_then(|dir| {
            host.own(&dir, owner.uid, owner.gid)?;
            if host.privileged() {
                dir.set_permissions(std::fs::Permissions::from_mode(mode))
            } else {
                Ok(())
            }
        })
        .map_err(|e| format!("setting the owner of {path:?}: {e}"))
}

/// Adds a user to a group, and reads back that it is in it.
fn add_to_group(host: &Host, user: &str, group: &str, deadline: Duration) -> Result<bool, String> {
    if host.members(group).iter().any(|member| member == user) {
        return Ok(false);
    }
    Run::new("usermod", deadline).args(["-a", "-G", group, "--", user]).check().map_err(|e| e.to_string())?;
    if host.members(group).iter().any(|member| member == user) {
        return Ok(true);
    }
    Err(format!("usermod succeeded, and {user} is not in group {group} all the same"))
}

/// Adds operators to group `ployz`: only those who were named.
pub(crate) fn operators(
    host: &Host,
    users: &[String],
    deadline: Duration,
    _admission: &Admission,
) -> Result<Prepared, String> {
    let mut prepared = Prepared::default();
    for user in users {
        if add_to_group(host, user, "ployz", deadline)? {
            prepared.done.push(format!("{user} is in group ployz (from the next login on)"));
        }
    }
    Ok(prepared)
}

/// Users who were named as operators and do not exist here.
pub(crate) fn unknown_users(host: &Host, users: &[String]) -> Vec<Problem> {
    // Accounts of a directory service can't be seen by a static binary; usermod can't change those either.
    users
        .iter()
        .filter(|user| host.account(user).is_none())
        .map(|user| {
            Problem::new(format!("there is no local user {user:?}"), "make the account first: useradd --help")
        })
        .collect()
}

/// What `--software-only` finds missing: it prepares nothing by itself.
pub(crate) fn missing_prerequisites(host: &Host, docker: Docker) -> Vec<Problem> {
    let help = "let install prepare the host: run it without --software-only";
    let mut problems: Vec<Problem> = missing(host)
        .into_iter()
        .map(|account| Problem::new(format!("there is no {account}"), help))
        .collect();
    let state = host.state();
    if !state.is_dir() {
        problems.push(Problem::new(format!("there is no directory {}", state.display()), help));
    }
    if docker == Docker::Auto && host.group("docker").is_none() {
        problems.push(Problem::new(
            "there is no Docker (no group docker)",
            "install Docker, or say that this Machine does without: --docker none",
        ));
    }
    problems
}

/// Accounts that the units of a release name and that are not there.
pub(crate) fn missing_for_units(host: &Host, units: &[units::Unit], version: Version) -> Vec<Problem> {
    units::missing_accounts(host, units)
        .into_iter()
        .map(|account| {
            Problem::new(
                format!("the release's units need {account}, which is not there"),
                format!("let root's install make it: sudo {} install --version {version}", units::EXECUTABLE),
            )
        })
        .collect()
}
