//! An image that is pulled: how far it is, and whether anything still comes. Docker repeats what it knows ten times a
//! second though nothing comes any more, and says nothing at all while it unpacks: silence is not what tells the two apart.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::door::{Failed, Progress};
use super::engine::failed;
use super::replace::Work;
use super::spec::{Spec, name_and_tag};
use crate::docker::DockerError;

/// For all of it.
const PULL: Duration = Duration::from_secs(30 * 60);
/// While nothing new comes of what is not complete.
const STALL: Duration = Duration::from_secs(60);
/// For unpacking what is.
const UNPACK: Duration = Duration::from_secs(15 * 60);
/// Between two tellings of how far it is, and between two looks at whether anything comes.
const TELL: Duration = Duration::from_millis(200);
/// Docker lists an image's layers: more than any image has.
const MOST_LAYERS: usize = 1000;

/// Pulls the image of a specification.
pub(super) async fn pull(work: &mut Work<'_>, spec: &Spec) -> Result<(), Failed> {
    work.stage("pulling", spec.image.clone());
    let (name, tag) = name_and_tag(&spec.image);
    let (docker, tell) = (work.docker, &mut work.tell);
    let heard = Mutex::new(Heard::new(Instant::now()));
    let heard = || -> MutexGuard<'_, Heard> { heard.lock().unwrap_or_else(PoisonError::into_inner) };
    let mut told = Instant::now();
    let mut unpacking = false;
    let mut came = |said: &Value| {
        let mut heard = heard();
        heard.take(said, Instant::now());
        if !unpacking && heard.unpacks() {
            unpacking = true;
            tell(Progress {
                stage: "unpacking".into(),
                detail: Some(spec.image.clone()),
                bytes: None,
                total: None,
            });
        } else if !unpacking && told.elapsed() >= TELL {
            told = Instant::now();
            if let Some((bytes, total)) = heard.so_far() {
                tell(Progress {
                    stage: "pulling".into(),
                    detail: None,
                    bytes: Some(bytes),
                    total: Some(total),
                });
            }
        }
    };
    let given_up = async {
        let started = Instant::now();
        loop {
            sleep(TELL).await;
            let given_up = if started.elapsed() >= PULL {
                Some(format!("it was not pulled within {} s", PULL.as_secs()))
            } else {
                heard().given_up(Instant::now())
            };
            if let Some(why) = given_up {
                return why;
            }
        }
    };
    // Ending the request ends Docker's pull.
    let pulled = tokio::select! {
        pulled = docker.pull(name, tag, UNPACK, &mut came) => pulled,
        why = given_up => return Err(not_pulled(spec, &format!(": {why}"))),
    };
    pulled.map_err(|e| match e {
        DockerError::Refused { message, .. } => not_pulled(spec, &format!(" can't be pulled: {message}")),
        e => e.into(),
    })
}

fn not_pulled(spec: &Spec, why: &str) -> Failed {
    let image = &spec.image;
    failed("image", format!("image {image}{why}"), format!("try it by hand: docker pull {image}"))
}

/// What Docker has said of each layer, and when that was last something new.
struct Heard {
    layers: BTreeMap<String, Layer>,
    news: Instant,
}

#[derive(PartialEq, Eq)]
struct Layer {
    status: String,
    bytes: u64,
    total: u64,
}

impl Layer {
    /// All of it is here. It may have to be unpacked.
    fn is_complete(&self) -> bool {
        matches!(
            self.status.as_str(),
            "Download complete" | "Extracting" | "Pull complete" | "Already exists"
        )
    }
}

impl Heard {
    fn new(now: Instant) -> Self {
        Self { layers: BTreeMap::new(), news: now }
    }

    fn take(&mut self, said: &Value, now: Instant) {
        let (Some(id), Some(status)) = (said["id"].as_str(), said["status"].as_str()) else {
            self.news = now;
            return;
        };
        // Not a layer: the image's tag, as the first of all lines has it.
        if status.starts_with("Pulling from ") || self.layers.len() > MOST_LAYERS {
            return;
        }
        let number = |field: &str| said["progressDetail"][field].as_u64();
        let before = self.layers.get(id);
        let before = before.map(|layer| (layer.bytes, layer.total)).unwrap_or_default();
        // What is complete keeps the numbers that it had; those of unpacking are others.
        let (bytes, total) = match (status, number("current")) {
            ("Downloading", Some(bytes)) => (bytes, number("total").unwrap_or(bytes).max(bytes)),
            ("Downloading", None) => before,
            _ => (before.1, before.1),
        };
        let layer = Layer { status: status.to_owned(), bytes, total };
        let unpacked = status == "Extracting";
        if unpacked || self.layers.get(id) != Some(&layer) {
            self.news = now;
            self.layers.insert(id.to_owned(), layer);
        }
    }

    fn is_complete(&self) -> bool {
        !self.layers.is_empty() && self.layers.values().all(Layer::is_complete)
    }

    /// All of it is here, and what came has to be unpacked.
    fn unpacks(&self) -> bool {
        self.is_complete() && self.layers.values().any(|layer| layer.status != "Already exists")
    }

    /// Bytes that have come, of so many that are known of; nothing before any came.
    fn so_far(&self) -> Option<(u64, u64)> {
        let sum = |of: fn(&Layer) -> u64| self.layers.values().map(of).sum::<u64>();
        let (bytes, total) = (sum(|layer| layer.bytes), sum(|layer| layer.total));
        (total > 0).then_some((bytes, total))
    }

    /// Why nothing is expected of it any more.
    fn given_up(&self, now: Instant) -> Option<String> {
        let silent = now.duration_since(self.news);
        let complete = self.is_complete();
        if silent < if complete { UNPACK } else { STALL } {
            return None;
        }
        Some(if complete {
            format!("it was not unpacked within {} s", UNPACK.as_secs())
        } else {
            format!("nothing of it came for {} s", STALL.as_secs())
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_repeated_is_no_news_and_what_is_unpacked_may_take_its_time() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut heard = Heard::new(start);
        assert_eq!(heard.given_up(at(59)), None);
        assert_eq!(heard.given_up(at(60)).as_deref(), Some("nothing of it came for 60 s"));
        let layer = |id: &str, status: &str| json!({"id": id, "status": status, "progressDetail": {}});
        let comes = |bytes: u64| json!({"id": "b", "status": "Downloading", "progressDetail": {"current": bytes, "total": 90}});
        heard.take(&json!({"id": "1", "status": "Pulling from web"}), at(1));
        heard.take(&layer("a", "Pulling fs layer"), at(10));
        heard.take(&layer("b", "Pulling fs layer"), at(10));
        assert_eq!(heard.so_far(), None);
        heard.take(&comes(30), at(20));
        heard.take(&layer("a", "Download complete"), at(30));
        assert_eq!(heard.so_far(), Some((30, 90)));
        for again in 31..100 {
            heard.take(&comes(30), at(again));
        }
        assert_eq!(heard.given_up(at(89)), None);
        assert!(heard.given_up(at(90)).is_some(), "the same again is no news");
        heard.take(&comes(31), at(100));
        assert_eq!(heard.given_up(at(159)), None);
        heard.take(&layer("b", "Download complete"), at(110));
        assert_eq!((heard.unpacks(), heard.so_far()), (true, Some((90, 90))));
        assert_eq!(heard.given_up(at(1000)), None);
        assert_eq!(heard.given_up(at(1010)).as_deref(), Some("it was not unpacked within 900 s"));
        heard.take(&json!({"status": "Digest: sha256:0"}), at(1011));
        assert_eq!(heard.given_up(at(1011)), None);
        let mut here = Heard::new(start);
        here.take(&layer("a", "Already exists"), at(1));
        assert_eq!((here.is_complete(), here.unpacks()), (true, false));
    }
}
