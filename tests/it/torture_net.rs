//! Real servers behind a network that fails in every way, and servers killed with -9, while agents
//! append and the daemon is killed now and then: acknowledged bytes are in every copy, and in the
//! end everything is durable.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::support::TempHome;
use crate::support::backend::{Backend, Running, transcript};
use crate::support::load::{Load, Replay};
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::rng::TestRng;
use crate::support::servers::{Postgres, S3, postgres, s3};
use crate::torture::{seed, start_agent};

/// Agents side by side, each a process with a session of its own, all in one home.
const AGENTS: u64 = 4;
/// A request that hangs is given up after this; the store is on loopback.
const TIMEOUT: [&str; 2] = ["--request-timeout", "400ms"];

fn session(agent: u64) -> String {
    format!("session-{agent}")
}

/// Any fault at all, or none.
fn fault(dice: &mut TestRng) -> Mode {
    // Within the header of a request or an answer, or in its body.
    let byte = usize::try_from(1 + dice.below(4000)).unwrap();
    match dice.below(12) {
        0..=2 => Mode::Pass,
        11 => Mode::Refuse,
        3 => Mode::Hang,
        4 => Mode::CutAfter(byte % 500),
        5 => Mode::CutRequestAfter(byte),
        6 => Mode::DropResponses,
        7 => Mode::Swallow,
        8 => Mode::HalfClose,
        9 => Mode::Delay(Duration::from_millis(dice.below(600))),
        _ => Mode::Throttle(1000 + byte * 10),
    }
}

/// What breaks things until it is told to stop; everything is whole again when it returns.
type Breaker<'a> = Box<dyn FnOnce(&AtomicBool) + Send + 'a>;

/// Agents append and the daemon streams to `broken` for so long while `breakers` break it; copies are fetched on another way
/// if there is a `direct` one, and then always succeed.
fn endure(
    broken: &Backend,
    direct: Option<&Backend>,
    seed: u64,
    long: Duration,
    breakers: Vec<Breaker<'_>>,
) -> (Load, Running) {
    let mut dice = TestRng::new(seed);
    let mut load = Load::new(TempHome::new());
    let mut daemon = broken.daemon(&load.home, &TIMEOUT);
    let transcripts: Vec<PathBuf> = (0..AGENTS)
        .map(|agent| transcript(&load.home, &session(agent)))
        .collect();
    let start = |agent: u64, dice: &mut TestRng| {
        start_agent(
            &transcripts[usize::try_from(agent).unwrap()..][..1],
            dice.below(u64::MAX),
        )
    };
    let mut agents: Vec<Running> = (0..AGENTS).map(|agent| start(agent, &mut dice)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = Stop(&over);
        for breaker in breakers {
            let over = &over;
            scope.spawn(move || breaker(over));
        }
        let began = Instant::now();
        // On a slow machine longer, until enough was acknowledged in the midst of it.
        while began.elapsed() < long || (load.flushes.0 < 3 && began.elapsed() < 3 * long) {
            // Late is what they may be; wrong is what they may not.
            load.flush(broken, "700ms").ok();
            let one = session(dice.below(AGENTS));
            load.flush_session(broken, &one, "2s").ok();
            let fetched = load.check_copy(direct.unwrap_or(broken), &one);
            assert!(fetched || direct.is_none(), "{one} cannot be fetched");
            if dice.below(3) == 0 {
                daemon.kill();
                daemon = broken.daemon(&load.home, &TIMEOUT);
                load.kills += 1;
            }
            if dice.below(3) == 0 {
                let number = dice.below(AGENTS);
                let agent = &mut agents[usize::try_from(number).unwrap()];
                agent.kill();
                *agent = start(number, &mut dice);
                load.kills += 1;
            }
        }
        drop(stop);
    });
    drop(agents);
    (load, daemon)
}

/// Tells the breakers to stop, also when a check has failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn every_kind_of_network_fault_loses_nothing() {
    let (Some(s3), Some(postgres)) = (s3(), postgres()) else {
        return;
    };
    let seed = seed();
    let _replay = Replay {
        seed,
        test: "torture_net::every_kind_of_network_fault_loses_nothing",
    };
    let proxies = [s3.addr(), postgres.addr()].map(TcpProxy::start);
    let (bucket, database) = (s3.fresh_bucket(), postgres.fresh_database());
    let direct = Backend::on(&s3.endpoint, &bucket, &database);
    let behind = database.replace(&postgres.addr().to_string(), &proxies[1].addr().to_string());
    let broken = Backend::on(&format!("http://{}", proxies[0].addr()), &bucket, &behind);
    let changes = AtomicU32::new(0);
    let breakers = proxies
        .iter()
        .zip(1..)
        .map(|(proxy, number)| -> Breaker<'_> {
            let changes = &changes;
            Box::new(move |over| {
                let mut dice = TestRng::new(seed + number);
                while !over.load(SeqCst) {
                    proxy.set(fault(&mut dice));
                    changes.fetch_add(1, SeqCst);
                    std::thread::sleep(Duration::from_millis(100 + dice.below(500)));
                }
                proxy.set(Mode::Pass);
            })
        });
    let (mut load, _daemon) = endure(
        &broken,
        Some(&direct),
        seed,
        Duration::from_secs(20),
        breakers.collect(),
    );
    load.check_all(&direct);
    load.check_reindex(&direct);
    let connections = proxies.each_ref().map(TcpProxy::connections);
    load.summarize(&format!(
        "a network that changed {} times, {connections:?} connections",
        changes.load(SeqCst)
    ));
    assert!(
        connections.iter().all(|connections| *connections > 5),
        "{connections:?}: the proxies were hardly used"
    );
}

#[test]
fn servers_killed_under_load_lose_nothing() {
    let (Some(s3), Some(postgres)) = (S3::start_private(), Postgres::start_private()) else {
        return;
    };
    let seed = seed();
    let _replay = Replay {
        seed,
        test: "torture_net::servers_killed_under_load_lose_nothing",
    };
    let backend = Backend::on_server(
        &s3,
        &s3.endpoint,
        &s3.fresh_bucket(),
        &postgres.fresh_database(),
    );
    let kills = [AtomicU32::new(0), AtomicU32::new(0)];
    let breaker =
        |number: usize, kill: Box<dyn Fn() + Send>, start: Box<dyn Fn() + Send>| -> Breaker<'_> {
            let kills = &kills[number];
            Box::new(move |over| {
                let mut dice = TestRng::new(seed + 1 + number as u64);
                // Three at least, however slow the machine; the agents go on writing until then.
                while !over.load(SeqCst) || kills.load(SeqCst) < 3 {
                    std::thread::sleep(Duration::from_millis(dice.below(2500)));
                    kill();
                    kills.fetch_add(1, SeqCst);
                    std::thread::sleep(Duration::from_millis(dice.below(500)));
                    start();
                }
            })
        };
    let breakers = vec![
        breaker(0, Box::new(|| s3.stop()), Box::new(|| s3.start())),
        breaker(
            1,
            Box::new(|| postgres.kill()),
            Box::new(|| postgres.start()),
        ),
    ];
    let (mut load, _daemon) = endure(&backend, None, seed, Duration::from_secs(20), breakers);
    load.check_all(&backend);
    load.check_reindex(&backend);
    let kills = kills.map(AtomicU32::into_inner);
    load.summarize(&format!("servers killed {kills:?} times"));
}
