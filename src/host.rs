//! The host that is installed on: every path that the project touches, and who may own what there.
//!
//! One value, given to every function that touches the host; a test gives it a temporary root.
//! [`Host::system`] is the only place that names `/`.

use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Uid};

/// The uid and gid that own nothing: used for untrusted children before `ployz-fetch` exists.
const NOBODY: u32 = 65534;

/// An account: user id and primary group id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
}

/// Where everything is, and what this process may do there.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
    program: PathBuf,
    privileged: bool,
}

impl Host {
    /// The running system.
    pub fn system() -> Self {
        Self {
            root: PathBuf::from("/"),
            program: PathBuf::from("/proc/self/exe"),
            privileged: Uid::effective().is_root(),
        }
    }

    /// A host under a directory, without accounts, ownership or systemd; `program` is the `ployzd` whose hidden
    /// verbs serve as children.
    pub fn under(root: &Path, program: &Path) -> Self {
        Self { root: root.to_owned(), program: program.to_owned(), privileged: false }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Docker's socket.
    pub fn docker(&self) -> PathBuf {
        self.at("run/docker.sock")
    }

    /// Docker's configuration.
    pub fn daemon_json(&self) -> PathBuf {
        self.at("etc/docker/daemon.json")
    }

    /// A program of the host by its name: for a host under a directory the one that is there.
    pub fn tool(&self, name: &str) -> PathBuf {
        if self.root == Path::new("/") { PathBuf::from(name) } else { self.at("usr/bin").join(name) }
    }

    /// Where a program of the host is, if it is there.
    pub fn find_tool(&self, name: &str) -> Option<PathBuf> {
        let dirs = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];
        dirs.iter().map(|dir| self.at(dir).join(name)).find(|path| path.is_file())
    }

    /// `ID` and `VERSION_ID` of os-release(5); empty where it does not say.
    pub fn os_release(&self) -> (String, String) {
        let text = ["etc/os-release", "usr/lib/os-release"]
            .iter()
            .find_map(|file| std::fs::read_to_string(self.at(file)).ok())
            .unwrap_or_default();
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().trim_matches(['"', '\'']).to_owned()
        };
        (field("ID"), field("VERSION_ID"))
    }

    /// The deploy door.
    pub fn deploy_door(&self) -> PathBuf {
        self.at("run/ployz-deploy/deploy.sock")
    }

    /// What the deploy worker keeps: what it is doing, and which engine it did it on.
    pub fn deploy_state(&self) -> PathBuf {
        self.at("var/lib/ployz-deploy")
    }

    /// The socket of the volume plugin.
    pub fn volume_plugin(&self) -> PathBuf {
        self.at("run/docker/plugins/ployz.sock")
    }

    /// Variables of the environment of our units.
    pub fn defaults(&self) -> PathBuf {
        self.at("etc/default/ployz")
    }

    /// Where volumes are mounted.
    pub fn volumes(&self) -> PathBuf {
        self.at("var/lib/ployz-volumes")
    }

    /// Which mounts of volumes are whose, in this boot.
    pub fn volume_users(&self) -> PathBuf {
        self.at("run/ployz-volumes")
    }

    /// Where volumes are kept, as it was prepared.
    pub fn storage_json(&self) -> PathBuf {
        self.at("etc/ployz/storage.json")
    }

    /// The lock of the deploy worker that changes something.
    pub fn deploy_lock(&self) -> PathBuf {
        self.deploy_state().join("deploy.lock")
    }

    /// The executable that hidden verbs (`fetch`, `confine`) are started from: `/proc/self/exe`, which works for
    /// an unlinked file and for another uid.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Whether owners can be set and uids be changed: root on the running system.
    pub fn privileged(&self) -> bool {
        self.privileged
    }

    /// Whether systemd is PID 1 of this host (`sd_booted(3)`), and not only of the host around a chroot.
    pub fn systemd_runs(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        let same = |a: std::fs::Metadata, b: std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        let outside = match (std::fs::metadata("/proc/1/root"), std::fs::metadata("/")) {
            (Ok(first), Ok(own)) => !same(first, own),
            // Who may not look can't be told; systemctl tells.
            _ => false,
        };
        self.at("run/systemd/system").is_dir() && !outside
    }

    /// `/`.
    pub fn root(&self) -> PathBuf {
        self.root.clone()
    }
    /// `/usr`.
    pub fn usr(&self) -> PathBuf {
        self.at("usr")
    }
    /// `/usr/local/bin`, where the current release lives.
    pub fn bin(&self) -> PathBuf {
        self.at("usr/local/bin")
    }
    /// The current release.
    pub fn installed(&self) -> PathBuf {
        self.at("usr/local/bin/ployzd")
    }
    /// The last release that was confirmed before the current one.
    pub fn previous(&self) -> PathBuf {
        self.at("usr/local/bin/ployzd.previous")
    }
    /// The next release: extracted where it will live (same filesystem, right label) and renamed from there.
    pub fn next(&self, attempt: &str) -> PathBuf {
        self.at("usr/local/bin").join(format!(".ployzd.{attempt}"))
    }
    /// `/usr/local/lib/ployz`.
    pub fn lib(&self) -> PathBuf {
        self.at("usr/local/lib/ployz")
    }
    /// Archives and checksums of attempts, one directory each.
    pub fn staging(&self) -> PathBuf {
        self.at("usr/local/lib/ployz/staging")
    }
    /// Copies that installers run from.
    pub fn own_copies(&self) -> PathBuf {
        self.at("usr/local/lib/ployz/self")
    }
    /// What is installed: current and previous.
    pub fn installed_json(&self) -> PathBuf {
        self.at("usr/local/lib/ployz/installed.json")
    }
    /// Our unit files: here `mask` and overrides in `/etc` work.
    pub fn units(&self) -> PathBuf {
        self.at("usr/local/lib/systemd/system")
    }
    /// The administrator's unit files.
    pub fn admin_units(&self) -> PathBuf {
        self.at("etc/systemd/system")
    }
    /// Accounts, declared.
    pub fn sysusers(&self) -> PathBuf {
        self.at("usr/local/lib/sysusers.d/ployz.conf")
    }
    /// Root's settings for installing.
    pub fn settings(&self) -> PathBuf {
        self.at("etc/ployz/install.json")
    }
    /// Admission and attempt records.
    pub fn install_state(&self) -> PathBuf {
        self.at("var/lib/ployz-install")
    }
    /// The lock that is admission.
    pub fn admission(&self) -> PathBuf {
        self.at("var/lib/ployz-install/admission.lock")
    }
    /// One record a file.
    pub fn attempts(&self) -> PathBuf {
        self.at("var/lib/ployz-install/attempts")
    }
    /// Identity, pairing, configuration: the daemon's own.
    pub fn state(&self) -> PathBuf {
        self.at("var/lib/ployz")
    }
    /// The Machine API.
    pub fn api(&self) -> PathBuf {
        self.at("run/ployz/ployz.sock")
    }
    /// The upgrade door.
    pub fn door(&self) -> PathBuf {
        self.at("run/ployz-upgrade/upgrade.sock")
    }
    /// Where unit `name` of ours is, or would be.
    pub fn unit(&self, name: &str) -> PathBuf {
        self.units().join(name)
    }

    /// A path as PID 1 sees it, whatever mounts this process has of its own; as this process sees it where PID 1's view
    /// can't be entered.
    pub fn as_pid_1_sees(&self, path: &Path) -> PathBuf {
        let Ok(inside) = path.strip_prefix("/") else { return path.to_owned() };
        let seen = Path::new("/proc/1/root").join(inside);
        let same_root = self.privileged && self.systemd_runs();
        if same_root && seen.exists() { seen } else { path.to_owned() }
    }

    /// The account named so in `/etc/passwd`, if there is one.
    pub fn account(&self, name: &str) -> Option<Account> {
        let mut fields = self.entry("etc/passwd", name)?;
        let (uid, gid) = (fields.nth(1)?, fields.next()?);
        Some(Account { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    }

    /// The login shell of a user in `/etc/passwd`.
    pub fn shell(&self, name: &str) -> Option<String> {
        self.entry("etc/passwd", name)?.nth(5)
    }

    /// The groups whose member list in `/etc/group` has this user.
    pub fn groups_of(&self, user: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.at("etc/group")).unwrap_or_default();
        let lists = text.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, members) = (fields.next()?, fields.nth(2)?);
            members.split(',').any(|member| member == user).then(|| name.to_owned())
        });
        lists.collect()
    }

    /// The gid of the group named so in `/etc/group`, if there is one.
    pub fn group(&self, name: &str) -> Option<u32> {
        self.entry("etc/group", name)?.nth(1)?.parse().ok()
    }

    /// The members that `/etc/group` lists for a group.
    pub fn members(&self, group: &str) -> Vec<String> {
        let listed = self.entry("etc/group", group).and_then(|mut fields| fields.nth(2));
        listed
            .map(|names| names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect())
            .unwrap_or_default()
    }

    /// The fields after the name on the line of `name`. Read directly: a static binary has no NSS.
    fn entry(&self, file: &str, name: &str) -> Option<std::vec::IntoIter<String>> {
        let text = std::fs::read_to_string(self.at(file)).ok()?;
        text.lines().find_map(|line| {
            let rest = line.strip_prefix(name)?.strip_prefix(':')?;
            Some(rest.split(':').map(str::to_owned).collect::<Vec<_>>().into_iter())
        })
    }

    /// Who untrusted children run as: `ployz-fetch`, or nobody before that exists; `None` where uids can't be
    /// changed.
    pub fn untrusted(&self) -> Option<Account> {
        self.privileged.then(|| self.account("ployz-fetch").unwrap_or(Account { uid: NOBODY, gid: NOBODY }))
    }

    /// Sets owner and group of an open file, where this process may.
    ///
    /// # Errors
    /// The system's.
    pub fn own(&self, file: &std::fs::File, uid: u32, gid: u32) -> std::io::Result<()> {
        use std::os::unix::fs::MetadataExt;
        let meta = file.metadata()?;
        if self.privileged && (meta.uid(), meta.gid()) != (uid, gid) {
            nix::unistd::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        Ok(())
    }

    /// The boot that this is: a random id that the kernel makes at each boot. Our units are told it by systemd: from a
    /// sandbox `/proc/sys` may be hidden, and in a container it may show the boot of the host around it.
    pub fn boot_id(&self) -> String {
        let is_id = |text: &String| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let told = std::env::var("PLOYZ_BOOT_ID").ok().filter(is_id);
        told.unwrap_or_else(|| {
            let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            text.trim().replace('-', "")
        })
    }

    /// The host's name.
    pub fn name(&self) -> String {
        nix::unistd::gethostname()
            .ok()
            .and_then(|n| n.into_string().ok())
            .unwrap_or_else(|| "localhost".into())
    }

    /// What `/etc/os-release` calls the system: "Debian GNU/Linux 13 (trixie)".
    pub fn os(&self) -> Option<String> {
        let text = std::fs::read_to_string(self.at("etc/os-release")).ok()?;
        let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
        Some(name.trim_matches('"').to_owned())
    }
}

/// The machine architecture as releases name it, if a release exists for it.
pub fn architecture() -> Option<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Some("amd64"),
        "aarch64" => Some("arm64"),
        _ => None,
    }
}
