//! The distributions on which Docker can be put: one table. What is not in it is refused before anything is written.

use crate::host::Host;

/// How packages are installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manager {
    Apt,
    Dnf,
    Yum,
    Pacman,
    Zypper,
}

impl Manager {
    /// Its program.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::Apt => "apt-get",
            Self::Dnf => "dnf",
            Self::Yum => "yum",
            Self::Pacman => "pacman",
            Self::Zypper => "zypper",
        }
    }
}

/// One release of a distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Distribution {
    /// `ID` of os-release(5).
    pub(super) id: &'static str,
    /// `VERSION_ID`, or its beginning up to a dot; empty where every version is one.
    pub(super) version: &'static str,
    pub(super) manager: Manager,
    /// Where Docker's own packages for it are, below `https://download.docker.com/linux`: a path and, for apt, its suite.
    pub(super) repository: Option<(&'static str, &'static str)>,
    /// The distribution's own packages; none where they are older than what is used here.
    pub(super) own: &'static [&'static str],
}

const DEBIAN: &[&str] = &["docker.io", "docker-cli"];
const UBUNTU: &[&str] = &["docker.io"];

const fn row(
    id: &'static str,
    version: &'static str,
    manager: Manager,
    repository: Option<(&'static str, &'static str)>,
    own: &'static [&'static str],
) -> Distribution {
    Distribution { id, version, manager, repository, own }
}

/// Docker's packages first, then the distribution's own. Debian 12 has Docker 20.10, which is too old.
const TABLE: &[Distribution] = &[
    row("debian", "12", Manager::Apt, Some(("debian", "bookworm")), &[]),
    row("debian", "13", Manager::Apt, Some(("debian", "trixie")), DEBIAN),
    row("ubuntu", "22.04", Manager::Apt, Some(("ubuntu", "jammy")), UBUNTU),
    row("ubuntu", "24.04", Manager::Apt, Some(("ubuntu", "noble")), UBUNTU),
    row("ubuntu", "25.04", Manager::Apt, Some(("ubuntu", "plucky")), UBUNTU),
    row("ubuntu", "25.10", Manager::Apt, Some(("ubuntu", "questing")), UBUNTU),
    row("fedora", "", Manager::Dnf, Some(("fedora/$releasever", "")), &["moby-engine", "docker-cli"]),
    row("rhel", "9", Manager::Dnf, Some(("rhel/9", "")), &[]),
    row("rhel", "10", Manager::Dnf, Some(("rhel/10", "")), &[]),
    row("centos", "9", Manager::Dnf, Some(("centos/9", "")), &[]),
    row("centos", "10", Manager::Dnf, Some(("centos/10", "")), &[]),
    row("rocky", "9", Manager::Dnf, Some(("rhel/9", "")), &[]),
    row("rocky", "10", Manager::Dnf, Some(("rhel/10", "")), &[]),
    row("almalinux", "9", Manager::Dnf, Some(("rhel/9", "")), &[]),
    row("almalinux", "10", Manager::Dnf, Some(("rhel/10", "")), &[]),
    // Docker has no repository of its own for it; that of RHEL 9 fits.
    row("amzn", "2023", Manager::Dnf, Some(("rhel/9", "")), &["docker"]),
    row("amzn", "2", Manager::Yum, None, &["docker"]),
    row("arch", "", Manager::Pacman, None, &["docker"]),
    row("opensuse-tumbleweed", "", Manager::Zypper, None, &["docker"]),
    row("opensuse-leap", "15", Manager::Zypper, None, &["docker"]),
    row("opensuse-leap", "16", Manager::Zypper, None, &["docker"]),
];

/// The row for this host, or what it is instead. Derivatives are not guessed at: their repositories have other names.
pub(super) fn find(host: &Host) -> Result<Distribution, String> {
    let (id, version) = host.os_release();
    let fits = |row: &&Distribution| {
        let part = version.strip_prefix(row.version);
        row.id == id
            && (row.version.is_empty() || part.is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    TABLE.iter().find(fits).copied().ok_or_else(|| format!("{id} {version}").trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_distribution_is_known_by_its_name_and_version() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        let found = |text: &str| {
            std::fs::write(root.path().join("etc/os-release"), text).unwrap();
            find(&host)
        };
        assert_eq!(found("ID=debian\nVERSION_ID=\"13\"\n").unwrap().repository, Some(("debian", "trixie")));
        assert_eq!(found("ID=ubuntu\nVERSION_ID=\"24.04\"\n").unwrap().own, ["docker.io"]);
        assert_eq!(found("ID=\"amzn\"\nVERSION_ID=\"2023\"\n").unwrap().repository, Some(("rhel/9", "")));
        assert_eq!(found("ID=fedora\nVERSION_ID=44\n").unwrap().manager, Manager::Dnf);
        assert_eq!(found("ID=arch\n").unwrap().manager, Manager::Pacman);
        assert_eq!(found("ID=rocky\nVERSION_ID=\"9.6\"\n").unwrap().repository, Some(("rhel/9", "")));
        // A derivative, a version of which nothing is known, and one that only begins the same.
        assert_eq!(found("ID=linuxmint\nID_LIKE=ubuntu\nVERSION_ID=22\n").unwrap_err(), "linuxmint 22");
        assert_eq!(found("ID=debian\nVERSION_ID=11\n").unwrap_err(), "debian 11");
        assert_eq!(found("ID=debian\nVERSION_ID=130\n").unwrap_err(), "debian 130");
        assert_eq!(found("ID=debian\n").unwrap_err(), "debian");
        assert_eq!(found("nothing").unwrap_err(), "");
    }
}
