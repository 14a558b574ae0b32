//! A channel is resolved once, into one exact release, and never leads where it must not.

use kit::{Rule, release::point};
use ployz::install::attempt::Requested;
use ployz::install::events::What;
use ployz::install::release::Channel;
use ployz::install::{Request, Wanted};

use crate::world::{NONE, World, alone, channel, exact, request, version};

#[test]
fn a_pointer_never_leads_below_what_is_installed_nor_to_another_line() {
    let alone = alone();
    let (stable, beta) = (Channel::Stable, Channel::Beta);
    for (installed, asked, pointer, expected) in [
        (None, stable, "v1.4.0\n", Ok("1.4.0")),
        (None, stable, "1.4.0", Ok("1.4.0")),
        (Some("1.3.0"), stable, "v1.4.0\n", Ok("1.4.0")),
        (Some("1.4.0"), stable, "v1.4.0\n", Ok("1.4.0")),
        (Some("1.4.0"), beta, "v1.5.0-beta.2\n", Ok("1.5.0-beta.2")),
        (Some("1.5.0-beta.2"), beta, "v1.5.0\n", Ok("1.5.0")),
        (Some("1.5.0-beta.2"), stable, "v1.5.0\n", Ok("1.5.0")),
        (Some("1.5.0"), stable, "v1.4.0\n", Err("points to 1.4.0, older than the installed 1.5.0")),
        (Some("1.5.0-beta.2"), stable, "v1.4.0\n", Err("older than the installed 1.5.0-beta.2")),
        (Some("1.5.0"), beta, "v1.5.0-beta.2\n", Err("older than the installed 1.5.0")),
        (Some("1.5.0-beta.10"), beta, "v1.5.0-beta.9\n", Err("older than the installed 1.5.0-beta.10")),
        (None, stable, "v1.5.0-beta.2\n", Err("channel stable points to 1.5.0-beta.2, a prerelease")),
        (None, stable, "v2.0.0\n", Err("points to 2.0.0, outside major line 1")),
        (Some("1.4.0"), beta, "v2.0.0-beta.1\n", Err("outside major line 1")),
        (None, stable, "", Err("not one line with a version")),
        (None, stable, "v1.4.0\nv1.5.0\n", Err("not one line with a version")),
        (
            None,
            stable,
            "<html>rate limited</html>",
            Err(r#"holds "<html>rate limited</html>", not one line"#),
        ),
        (None, stable, "v1.4.0/../../../x\n", Err("not one line with a version")),
    ] {
        let world = World::new(&alone);
        let what = format!("{installed:?} {asked} {pointer:?}");
        for target in ["1.3.0", "1.4.0", "1.5.0", "1.5.0-beta.2", "1.5.0-beta.9", "1.5.0-beta.10", "2.0.0"] {
            world.release(target);
        }
        if let Some(installed) = installed {
            world.installed(&exact(installed));
        }
        world.server.rule(Rule::new(format!("/v1/{asked}")).body(pointer));
        match expected {
            Ok(target) => {
                let record = world.installed(&channel(asked));
                assert_eq!(record.target, Some(version(target)), "{what}");
                assert_eq!(record.requested, Requested::Channel(asked), "{what}");
            }
            Err(text) => {
                let before = world.installation();
                let refused = world.refused(&channel(asked));
                assert!(refused.contains(text), "{what}: {refused}");
                assert_eq!(world.installation(), before, "{what}");
            }
        }
    }
}

#[test]
fn it_is_resolved_once_whatever_the_pointer_does_meanwhile() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.5.0");
    world.release("1.4.0");
    let mut moved = false;
    let record = world
        .install_while(&channel(Channel::Stable), &mut |event| {
            if matches!(event.what, What::Stage { .. }) && !moved {
                moved = true;
                point(world.site(), "stable", "1.5.0").unwrap();
            }
            Ok(())
        })
        .unwrap();
    assert!(moved);
    assert_eq!(record.target, Some(version("1.4.0")));
    assert_eq!(world.inventory()["current"]["version"], "1.4.0");
    assert_eq!(world.server.requests_for("/v1/stable").len(), 1);
    let of_another = |path: &str| path.contains("1.5.0");
    assert!(!world.server.settled().iter().any(|request| of_another(&request.path)));
}

#[test]
fn the_line_is_that_of_what_is_installed_else_of_the_installer() {
    let alone = alone();
    let world = World::new(&alone);
    for target in ["1.4.0", "2.1.0"] {
        world.release(target);
    }
    let own = |own| Request { own_version: version(own), ..request(Wanted::Channel(Channel::Stable)) };
    assert_eq!(world.installed(&own("2.0.0")).target, Some(version("2.1.0")));
    assert_eq!(
        world.installed(&own("1.0.0")).target,
        Some(version("2.1.0")),
        "nobody is moved to another line"
    );
    assert_eq!(world.server.requests_for("/v1/stable").len(), 0);
}

#[test]
fn a_pointer_to_a_release_that_is_not_there_is_refused_before_acceptance() {
    let alone = alone();
    let world = World::new(&alone);
    point(world.site(), "stable", "1.7.0").unwrap();
    for (request, missing) in [
        (channel(Channel::Stable), "/releases/download/v1.7.0/checksums.txt does not exist (status 404)"),
        (channel(Channel::Beta), "/v1/beta does not exist (status 404)"),
        (exact("1.8.0"), "/releases/download/v1.8.0/checksums.txt does not exist (status 404)"),
    ] {
        let refused = world.refused(&request);
        assert!(refused.contains(missing), "{refused}");
        assert!(!world.host.install_state().exists(), "not even the directory of records is made");
        assert!(!world.host.lib().exists());
        assert_eq!(world.left_over(), NONE);
    }
    assert_eq!(world.server.settled().len(), 4, "what does not exist is asked for once");
}
