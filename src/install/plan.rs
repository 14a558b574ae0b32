//! What an installation would change, found without taking admission and without writing anything.

use serde::Serialize;

use super::admission::{self, Observed};
use super::archive::find_checksum;
use super::events::Refusal;
use super::installed::{Docker, Inventory, on_disk};
use super::preflight::{self, Problem};
use super::release::{Version, archive_name};
use super::units::{self, SYSUSERS};
use super::{Mode, Request, Source, host as prepare};
use crate::durable::{read_bounded, sha256_file};
use crate::host::{Host, architecture};
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// One thing that an installation would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// A file, an account or a unit.
    pub what: String,
    /// What would become of it.
    pub how: String,
}

/// What an installation would do now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The exact release.
    pub target: Version,
    /// What is in place, if that is described.
    pub from: Option<Version>,
    /// In the order in which it would happen.
    pub changes: Vec<Change>,
    /// What can't be known before it is done, or is worth knowing.
    pub notes: Vec<String>,
}

/// Plans an installation.
///
/// # Errors
/// A refusal, with all problems that an installation would be refused for.
pub fn plan(host: &Host, request: &Request, interrupt: &Interrupt) -> Result<Plan, Refusal> {
    let settings = super::ready_to_ask(host, request)?;
    let release = super::resolve(host, &settings, request, interrupt)?;
    let systemd =
        (request.mode != Mode::InstallationOnly).then(|| Systemd::new(settings.deadlines.systemctl));
    let (inventory, damage) = Inventory::read(host);
    let docker = request.docker.unwrap_or(inventory.docker);
    let mut problems = preflight::host_problems(host, systemd, super::flow::room(host, &release));
    if request.mode == Mode::Prepare {
        problems.extend(prepare::docker::problems(host, systemd, docker));
        problems.extend(prepare::storage::problems(host, request.storage.as_ref()));
    }
    if request.mode == Mode::SoftwareOnly {
        problems.extend(prepare::missing_prerequisites(host, docker));
    }
    let name = architecture().map(archive_name).unwrap_or_default();
    let published = match &release.source {
        Source::Itself | Source::Retained => None,
        Source::Published { sums } => sums.clone(),
        Source::Local { checksums, .. } => {
            match super::acquisition::local_sums(checksums, settings.signing_key.is_some()) {
                Ok(sums) => Some(sums),
                Err(failure) => return Err(Refusal::one(failure.error(), "look at the file")),
            }
        }
    };
    let mut archive_sha256 = None;
    if let Some(sums) = &published {
        let signed = settings.signing_key.as_ref().map_or(Ok(()), |key| sums.check_signature(key));
        match signed.and_then(|()| find_checksum(&sums.checksums, &name)) {
            Ok(expected) => archive_sha256 = Some(expected),
            Err(e) => problems.push(Problem::new(e.to_string(), "do not install from this source")),
        }
    }
    if let (Source::Local { archive, .. }, Some(expected)) = (&release.source, &archive_sha256) {
        match sha256_file(archive) {
            Ok(found) if found == *expected => {}
            Ok(found) => problems.push(Problem::new(
                format!("{archive:?} has sha256 {found}, and checksums.txt says {expected}"),
                "do not install it",
            )),
            Err(e) => problems.push(Problem::new(format!("reading {archive:?}: {e}"), "look at the file")),
        }
    }
    if !problems.is_empty() {
        return Err(Refusal::Refused(problems));
    }

    let mut changes = Vec::new();
    let mut notes: Vec<String> = damage.into_iter().collect();
    match admission::observe(host) {
        Observed::Free => {}
        observed => notes.push(format!("now it would be refused: {}", admission::describe(&observed))),
    }
    if request.mode != Mode::SoftwareOnly {
        prepared(host, request, (docker, systemd), &mut changes);
    }
    let current = on_disk(&host.installed()).ok().flatten().map(|(_, sha256)| sha256);
    let described = current.as_ref().and_then(|sha256| inventory.describes(sha256)).cloned();
    let from = described.as_ref().map(|described| described.version);
    let same = match &release.source {
        Source::Itself => sha256_file(host.program()).ok() == current && current.is_some(),
        _ => described.as_ref().is_some_and(|described| {
            described.version == release.version && described.archive_sha256 == archive_sha256
        }),
    };
    if !same {
        let path = host.installed().display().to_string();
        let how = match (&current, from) {
            (None, _) => format!("written: {}", release.version),
            (Some(_), Some(from)) => format!("replaced: {from} by {}", release.version),
            (Some(sha256), None) => {
                format!("replaced: {}… (not described) by {}", &sha256[..8], release.version)
            }
        };
        changes.push(Change { what: path, how });
        if described.as_ref().is_some_and(|described| described.confirmed) {
            let what = host.previous().display().to_string();
            changes.push(Change { what, how: "the current release, kept".into() });
        }
    }
    // A release says itself which units it brings.
    let brought = match (&release.source, same) {
        (Source::Itself, _) => Ok(Some(units::shipped())),
        (_, true) => units::ask(host, &host.installed(), settings.deadlines.preflight, interrupt),
        (_, false) => Ok(None),
    };
    match brought {
        Ok(Some(brought)) => {
            changes.extend(units::differing(host, &brought).into_iter().map(|unit| Change {
                what: host.unit(&unit.name).display().to_string(),
                how: "written".into(),
            }));
        }
        Ok(None) => {
            notes.push(format!(
                "units: what {} says of them is known once it has been fetched",
                release.version
            ));
        }
        Err(e) => notes.push(format!("units: {e}")),
    }
    Ok(Plan { target: release.version, from, changes, notes })
}

/// What preparing the host would make.
fn prepared(
    host: &Host,
    request: &Request,
    (docker, systemd): (Docker, Option<Systemd>),
    changes: &mut Vec<Change>,
) {
    let mut change = |what: String, how: &str| changes.push(Change { what, how: how.into() });
    if read_bounded(&host.sysusers(), SYSUSERS.len()).ok().as_deref() != Some(SYSUSERS.as_bytes()) {
        change(host.sysusers().display().to_string(), "written");
    }
    for account in prepare::missing(host) {
        change(account, "created");
    }
    let state = (request.mode == Mode::Prepare).then(|| host.state());
    for dir in [host.install_state(), host.attempts(), host.lib()].into_iter().chain(state) {
        if !dir.exists() {
            change(dir.display().to_string(), "created");
        }
    }
    for user in request.operators.iter().filter(|user| !host.members("ployz").contains(user)) {
        change(format!("user {user}"), "added to group ployz");
    }
    if let Some(how) = prepare::docker::plan(host, systemd, docker).filter(|_| request.mode == Mode::Prepare)
    {
        change("Docker".into(), &how);
    }
    if let Some(how) = prepare::storage::plan(host, request.storage.as_ref()) {
        change("storage".into(), &how);
    }
    let deploys = docker == Docker::Auto && host.group("docker").is_some();
    if deploys && !host.members("docker").iter().any(|member| member == "ployz-deploy") {
        change("user ployz-deploy".into(), "added to group docker");
    }
}
