//! The lab of this process: its network, its scratch directory, and the janitor who leaves nothing behind.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::run::{Run, host, host_within};

/// Ends with the process that holds the other end of its standard input, however that ends: then the lab is
/// destroyed. It keeps the lab's lock until it is done, so that the next user of the same lab waits for it.
const JANITOR: &str = r#"
    scratch=$1 machine=$2
    exec 9>"$3" # never removed: a lock that is removed has two holders
    flock -w 300 9 || { echo "scenarios: lab $LAB_ID is in use by another process" >&2; exit 1; }
    clean() {
        "$machine" destroy-all && rm -rf --one-file-system "$scratch" && return
        echo "scenarios: lab $LAB_ID is not removed; type: LAB_ID=$LAB_ID $machine destroy-all" >&2
        return 1
    }
    clean && mkdir -p "$scratch" || exit
    echo ready
    cat >/dev/null
    clean
"#;

/// The lab of this process.
pub(crate) struct Lab {
    id: String,
    scratch: PathBuf,
    /// Sees that this process has ended by the end of its standard input, which the kernel closes.
    _janitor: (Child, ChildStdin),
}

/// The lab, made at the first call.
pub(crate) fn lab() -> &'static Lab {
    static LAB: OnceLock<Lab> = OnceLock::new();
    LAB.get_or_init(|| {
        prerequisites();
        sweep();
        Lab::make(&std::env::var("PLOYZ_LAB").unwrap_or_else(|_| format!("scen{}", std::process::id())))
    })
}

impl Lab {
    fn make(id: &str) -> Self {
        let scratch = caches().join("scenarios").join(id);
        fs::create_dir_all(caches().join("scenarios")).expect("making the scratch directory");
        let mut janitor = Command::new("sh")
            .args(["-c", JANITOR, "janitor"])
            .arg(&scratch)
            .arg(repository().join("qualification/machine"))
            .arg(caches().join("scenarios").join(format!(".{id}.lock")))
            .env("LAB_ID", id)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C ends the test, not its janitor.
            .process_group(0)
            .spawn()
            .expect("starting the janitor");
        let alive = janitor.stdin.take().expect("the janitor's standard input");
        let mut said = String::new();
        let stdout = janitor.stdout.take().expect("the janitor's standard output");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut said)
            .expect("hearing the janitor");
        assert_eq!(said.trim(), "ready", "the lab {id} can't be used: see above");
        let lab = Self { id: id.to_owned(), scratch, _janitor: (janitor, alive) };
        lab.machine(Duration::from_secs(30), &["net-up"]).ok();
        lab
    }

    /// Calls `qualification/machine` for this lab.
    #[track_caller]
    pub(crate) fn machine(&self, bound: Duration, words: &[&str]) -> Run {
        host_within(bound, &self.words(words))
    }

    /// The words of such a call.
    pub(crate) fn words(&self, words: &[&str]) -> Vec<String> {
        let script = repository().join("qualification/machine");
        let mut all = vec!["env".into(), format!("LAB_ID={}", self.id), script.display().to_string()];
        all.extend(words.iter().map(|word| (*word).to_owned()));
        all
    }

    /// Where this lab keeps machine `name`.
    pub(crate) fn state_of(&self, name: &str) -> PathBuf {
        let lab = std::env::var_os("LAB_DIR")
            .map_or_else(|| caches().join(format!("lab-{}", self.id)), PathBuf::from);
        lab.join(name)
    }
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("a repository").to_owned()
}

/// A directory of this process, removed when it has ended.
pub fn scratch() -> &'static Path {
    &lab().scratch
}

/// Says something while tests run: past the capture of their output.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "scenarios: {text}");
}

pub(crate) fn caches() -> PathBuf {
    std::env::var_os("PLOYZ_QUALIFICATION_DIR")
        .map_or_else(|| "/var/cache/ployz-qualification".into(), PathBuf::from)
}

/// What is missing is a failure: a scenario that was skipped has shown nothing.
fn prerequisites() {
    let setup = repository().join("qualification/setup");
    let found = host(&[setup.as_os_str(), "--check".as_ref()]);
    assert!(found.code == 0, "this host is not prepared; type: qualification/setup\n{}", found.shown());
}

/// Labs of earlier runs whose janitor was killed too: what they left is there, and nobody holds their lock.
fn sweep() {
    let all = caches().join("scenarios");
    for entry in fs::read_dir(&all).into_iter().flatten().flatten() {
        let id = entry.file_name().to_string_lossy().into_owned();
        let lock = File::open(all.join(format!(".{id}.lock")));
        if !id.starts_with("scen") || !lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            continue;
        }
        let machine = repository().join("qualification/machine");
        let words = ["env", &format!("LAB_ID={id}"), &machine.display().to_string(), "destroy-all"];
        if host(&words).code == 0 {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
