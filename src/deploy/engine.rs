//! What of Docker is ours: containers and volumes told from others', and who has a port.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::door::Failed;
use super::spec::{Port, Protocol, Spec, Volume};
use super::state::Memory;
use super::template::{self, SERVICE, SPEC, container_name, next_name};
use crate::docker::{Docker, DockerError, escaped};
use crate::host::Host;
use crate::text::printable;

/// Why something was not done, and what to type.
#[allow(clippy::needless_pass_by_value, reason = "errors come as they are")]
pub(super) fn failed(reason: &str, error: impl ToString, help: impl Into<String>) -> Failed {
    let help = Some(help.into()).filter(|help| !help.is_empty());
    Failed {
        reason: reason.into(),
        error: error.to_string(),
        now: String::new(),
        help: help.into_iter().collect(),
    }
}

impl From<DockerError> for Failed {
    fn from(e: DockerError) -> Self {
        failed(if e.is_away() { "docker" } else { "refused" }, &e, e.help())
    }
}

/// A container of ours, as Docker shows it.
#[derive(Debug, Clone)]
pub(super) struct Container {
    pub(super) id: String,
    pub(super) running: bool,
    /// What tells its specification from another.
    pub(super) spec: String,
    /// The policy that it has while it serves.
    pub(super) wanted_restart: String,
    /// The whole answer.
    pub(super) shown: Value,
}

/// The container of a service, under its own name or that of the one which is to take its place. One that has the name
/// and is not ours is an error: it is never touched.
pub(super) async fn find(docker: &Docker, service: &str, next: bool) -> Result<Option<Container>, Failed> {
    let name = if next { next_name(service) } else { container_name(service) };
    let Some(shown) = docker.find(&format!("/containers/{}/json", escaped(&name))).await? else {
        return Ok(None);
    };
    // An id or its beginning would do for Docker, too.
    if shown["Name"].as_str() != Some(&format!("/{name}")) {
        return Ok(None);
    }
    if shown["Config"]["Labels"][SERVICE].as_str() != Some(service) {
        let error = format!("there is a container {name} that is not one of Ployz's: it is not touched");
        return Err(failed("not_ours", error, format!("give it another name: docker rename {name} NAME")));
    }
    read(shown).map(Some)
}

/// One of ours by its id, if it is there.
pub(super) async fn by_id(docker: &Docker, id: &str) -> Result<Option<Container>, Failed> {
    match docker.find(&format!("/containers/{}/json", escaped(id))).await? {
        Some(shown) => read(shown).map(Some),
        None => Ok(None),
    }
}

fn read(shown: Value) -> Result<Container, Failed> {
    let text = |pointer: &str| shown.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let label = |name: &str| shown["Config"]["Labels"][name].as_str().unwrap_or_default().to_owned();
    Ok(Container {
        id: text("/Id"),
        running: shown["State"]["Running"].as_bool().unwrap_or_default(),
        spec: label(SPEC),
        wanted_restart: label(template::RESTART),
        shown,
    })
}

/// All services: what Docker shows of their containers, and those that were deployed and are not there.
pub(super) async fn list(host: &Host, docker: &Docker) -> Result<Value, Failed> {
    let engine = docker.engine().await?;
    let memory = Memory::read(host);
    if let Some(why) = memory.another(&engine) {
        return Err(engine_changed(why));
    }
    let filters = escaped(&json!({"label": [SERVICE]}).to_string());
    let all = docker.get(&format!("/containers/json?all=1&filters={filters}")).await?;
    let mut services = Vec::new();
    let mut seen = BTreeSet::new();
    for shown in all.as_array().into_iter().flatten() {
        let service = shown["Labels"][SERVICE].as_str().unwrap_or_default();
        let name = shown["Names"][0].as_str().unwrap_or_default();
        if name != format!("/{}", container_name(service)) {
            continue;
        }
        seen.insert(service.to_owned());
        let text = |value: &Value| printable(value.as_str().unwrap_or_default());
        let ports = shown["Ports"].as_array().into_iter().flatten().filter(|p| !p["PublicPort"].is_null());
        let ports: Vec<Value> = ports
            .map(|port| {
                json!({
                    "address": port["IP"], "host": port["PublicPort"], "container": port["PrivatePort"],
                    "protocol": port["Type"],
                })
            })
            .collect();
        let mounts = shown["Mounts"].as_array().into_iter().flatten();
        let volumes: Vec<Value> =
            mounts.map(|mount| json!({"name": mount["Name"], "target": mount["Destination"]})).collect();
        services.push(json!({
            "name": service, "image": text(&shown["Labels"]["ployz.image"]), "state": text(&shown["State"]),
            "status": text(&shown["Status"]), "container": shown["Id"], "ports": ports, "volumes": volumes,
            "restart": text(&shown["Labels"][template::RESTART]),
        }));
    }
    let missing = memory.services.iter().filter(|name| !seen.contains(*name));
    services.extend(missing.map(|name| json!({"name": name, "state": "missing"})));
    Ok(json!({"services": services, "docker": engine}))
}

/// Another store than the one that holds the services: nothing is concluded from what is not in it.
pub(super) fn engine_changed(why: String) -> Failed {
    let help = "put it back in /etc/docker/daemon.json and restart Docker; or give each of them up: \
                ployzd service remove NAME";
    failed("engine_changed", why, help)
}

/// A volume of ours of this name, made where there is none. Returns whether it was made.
pub(super) async fn volume(
    host: &Host,
    docker: &Docker,
    service: &str,
    volume: &Volume,
) -> Result<bool, Failed> {
    let name = &volume.name;
    if let Some(found) = docker.find(&format!("/volumes/{}", escaped(name))).await? {
        let plain = found["Options"].as_object().is_none_or(serde_json::Map::is_empty);
        let driver = found["Driver"].as_str().unwrap_or_default();
        // Docker forgets the labels of a plugin's volume whenever it can't ask for it; whose driver it is, it knows.
        if driver == "ployz" || (found["Labels"][SERVICE].is_string() && plain && driver == "local") {
            return Ok(false);
        }
        let error = format!(
            "volume {name} was not made by Ployz (driver {}{}): it is not used",
            printable(driver),
            if plain { "" } else { ", with options of its own" }
        );
        return Err(failed("volume", error, "use another name: docker volume ls"));
    }
    let driver = if host.unit("ployz-volume-plugin.socket").exists() { "ployz" } else { "local" };
    let asked = template::volume(service, name, driver);
    docker.call(hyper::Method::POST, "/volumes/create", Some(&asked), crate::docker::ANSWER).await?;
    Ok(true)
}

/// Who has one of the ports that a specification publishes; those of the container that it replaces are its own.
pub(super) async fn port_in_use(
    docker: &Docker,
    spec: &Spec,
    old: Option<&Container>,
) -> Result<Option<String>, Failed> {
    let all = docker.get("/containers/json").await?;
    let mut own: Vec<(u16, Protocol, Option<IpAddr>)> = Vec::new();
    for shown in all.as_array().into_iter().flatten() {
        let is_old = old.is_some_and(|old| shown["Id"].as_str() == Some(&old.id));
        for published in shown["Ports"].as_array().into_iter().flatten() {
            let number = published["PublicPort"].as_u64().and_then(|n| u16::try_from(n).ok());
            let protocol = match published["Type"].as_str() {
                Some("tcp") => Protocol::Tcp,
                Some("udp") => Protocol::Udp,
                _ => continue,
            };
            let Some(number) = number else { continue };
            let address = published["IP"].as_str().and_then(|text| text.parse().ok());
            if is_old {
                own.push((number, protocol, address));
                continue;
            }
            let wanted = |port: &&Port| {
                port.host == number && port.protocol == protocol && overlap(port.address, address)
            };
            if let Some(port) = spec.ports.iter().find(wanted) {
                let name = shown["Names"][0].as_str().unwrap_or("a container").trim_start_matches('/');
                let (number, protocol) = (port.host, port.protocol.name());
                return Ok(Some(format!(
                    "port {number}/{protocol} is held by container {}",
                    printable(name)
                )));
            }
        }
    }
    for port in &spec.ports {
        // Where the old container is published Docker itself listens.
        let is_own = |address| own.contains(&(port.host, port.protocol, address));
        if let Some(uid) = listener(port, &is_own) {
            let (number, protocol) = (port.host, port.protocol.name());
            return Ok(Some(format!("port {number}/{protocol} is held by a process of uid {uid}")));
        }
    }
    Ok(None)
}

/// Two addresses to listen on stand in each other's way when they are one, or when one of them is all.
fn overlap(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    let all = |address: Option<IpAddr>| address.is_none_or(|address| address.is_unspecified());
    all(one) || all(other) || one == other
}

/// The user of a socket of this host that has a port, at an address that is not the old container's own.
fn listener(port: &Port, is_own: &dyn Fn(Option<IpAddr>) -> bool) -> Option<String> {
    let files = match port.protocol {
        Protocol::Tcp => ["/proc/self/net/tcp", "/proc/self/net/tcp6"],
        Protocol::Udp => ["/proc/self/net/udp", "/proc/self/net/udp6"],
    };
    files.into_iter().find_map(|file| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        text.lines().skip(1).find_map(|line| in_table(line, port, is_own))
    })
}

/// The uid of a line of `/proc/net/tcp`, where that is a socket which has this port (proc(5)).
fn in_table(line: &str, port: &Port, is_own: &dyn Fn(Option<IpAddr>) -> bool) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (address, number) = words.get(1)?.split_once(':')?;
    // 0A: it listens; 07: a datagram socket that has a port.
    let state = if port.protocol == Protocol::Tcp { "0A" } else { "07" };
    if u16::from_str_radix(number, 16) != Ok(port.host) || words.get(3) != Some(&state) {
        return None;
    }
    let address = address_in_table(address);
    (overlap(port.address, address) && !is_own(address)).then(|| words.get(7).unwrap_or(&"?").to_string())
}

/// An address as the kernel prints it: words of 32 bits in the order of this machine.
fn address_in_table(text: &str) -> Option<IpAddr> {
    let words: Option<Vec<[u8; 4]>> = (0..text.len() / 8)
        .map(|n| u32::from_str_radix(text.get(n * 8..n * 8 + 8)?, 16).ok().map(u32::to_ne_bytes))
        .collect();
    match words?.as_slice() {
        [one] => Some(IpAddr::from(*one)),
        [a, b, c, d] => {
            let mut bytes = [0u8; 16];
            for (place, word) in bytes.chunks_exact_mut(4).zip([a, b, c, d]) {
                place.copy_from_slice(word);
            }
            Some(std::net::Ipv6Addr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_port_is_held_by_who_listens_where_it_is_wanted() {
        let port = |address: Option<&str>| Port {
            host: 8080,
            container: 80,
            protocol: Protocol::Tcp,
            address: address.map(|text| text.parse().unwrap()),
        };
        let line = |address: &str, state: &str| {
            format!(
                "   0: {address}:1F90 00000000:0000 {state} 00000000:00000000 00:00000000 00000000   33        0 1 1 0"
            )
        };
        let held = |line: &str, port: &Port| in_table(line, port, &|_| false);
        assert_eq!(held(&line("00000000", "0A"), &port(None)).as_deref(), Some("33"));
        assert_eq!(held(&line("0100007F", "0A"), &port(None)).as_deref(), Some("33"));
        assert_eq!(held(&line("0100007F", "0A"), &port(Some("127.0.0.1"))).as_deref(), Some("33"));
        assert_eq!(held(&line("0100007F", "0A"), &port(Some("10.0.0.1"))), None);
        assert_eq!(held(&line("0100007F", "01"), &port(None)), None, "a connection is no listener");
        let all_of_six = line(&"0".repeat(32), "0A");
        assert_eq!(held(&all_of_six, &port(Some("10.0.0.1"))).as_deref(), Some("33"));
        assert_eq!(held("garbage", &port(None)), None);
        let own = |address: Option<IpAddr>| address == "127.0.0.1".parse().ok();
        assert_eq!(in_table(&line("0100007F", "0A"), &port(None), &own), None);
        let elsewhere = in_table(&line("0200004D", "0A"), &port(None), &own);
        assert_eq!(
            elsewhere.as_deref(),
            Some("33"),
            "the old one's own port, at an address that it does not have"
        );
    }
}
