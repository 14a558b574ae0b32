//! Upgrades that are asked for through the daemon: asked, held in the middle, looked at when they ended.

use serde_json::{Value, json};

use crate::machine::Machine;
use crate::releases::Release;
use crate::server::Server;

const PLOYZD: &str = "/usr/local/bin/ployzd";

/// Sends archives so slowly that none comes to its end, until the server obeys: each connection ends after two seconds,
/// and the download goes on over the next one.
pub fn hold(server: &Server) {
    server.rules(&json!([{
        "path": "*.tar.gz", "drip": {"bytes": 1000, "every_ms": 100}, "cut": {"after": 20_000, "how": "reset"},
    }]));
}

impl Machine {
    /// Asks for an upgrade and does not follow it; its id.
    #[track_caller]
    pub fn ask_for(&self, version: &str) -> String {
        let run = self.run(&format!("{PLOYZD} upgrade --version {version} --no-follow --json")).expect(0);
        run.last()["record"]["id"].as_str().expect("an id").to_owned()
    }

    /// An upgrade that has come to the middle of its download, which goes on when the server obeys; its id.
    #[track_caller]
    pub fn ask_and_hold(&self, server: &Server, version: &str) -> String {
        hold(server);
        let id = self.ask_for(version);
        self.until("an archive is being fetched", |machine| {
            machine
                .run(&format!("find /usr/local/lib/ployz/staging/{id} -name '*.tar.gz' -size +1 | grep -q ."))
                .code
                == 0
        });
        id
    }

    /// What the daemon says of an attempt now.
    #[track_caller]
    pub fn told(&self, id: &str) -> Value {
        let url = format!("http://machine/v1/upgrades/{id}");
        self.run(&format!("curl -sS -m 20 --unix-socket /run/ployz/ployz.sock {url}")).expect(0).json()
    }

    /// The record of an attempt, when it has an outcome.
    #[track_caller]
    pub fn outcome_of(&self, id: &str) -> Value {
        self.until("it has an outcome", |machine| machine.attempt(id)["outcome"].is_object());
        self.until("its worker is gone", |machine| {
            machine.run("systemctl list-units --all --no-legend 'ployz-upgrade@*'").text().is_empty()
        });
        self.attempt(id)
    }

    /// Fails unless an upgrade succeeded, to this release, and left nothing.
    #[track_caller]
    pub fn assert_upgraded(&self, id: &str, to: &Release) -> Value {
        let record = self.outcome_of(id);
        assert_eq!(record["outcome"]["succeeded"]["version"], to.version.as_str(), "{record}");
        self.assert_runs(&to.version, &to.sha256);
        self.assert_nothing_left();
        self.assert_healthy();
        record
    }

    /// Fails if any unit has failed, or the door or the API is closed.
    #[track_caller]
    pub fn assert_healthy(&self) {
        let failed = self.run("systemctl is-system-running; systemctl --failed --no-legend --plain");
        assert_eq!(failed.text(), "running", "a unit failed");
        let sockets = self.run("systemctl is-active ployz.socket ployz-upgrade.socket");
        assert_eq!(sockets.text(), "active\nactive");
    }
}
