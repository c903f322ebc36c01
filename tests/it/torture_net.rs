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

/// Number of concurrent agents, each a process with its own session, all in one home.
const AGENTS: u64 = 4;
/// Timeout of a request; the store is on loopback.
const TIMEOUT: [&str; 2] = ["--request-timeout", "400ms"];

fn session(agent: u64) -> String {
    format!("session-{agent}")
}

/// A random fault, or none.
fn fault(rng: &mut TestRng) -> Mode {
    // Within the header of a request or a response, or in its body.
    let byte = usize::try_from(1 + rng.below(4000)).unwrap();
    match rng.below(12) {
        0..=2 => Mode::Pass,
        11 => Mode::Refuse,
        3 => Mode::Hang,
        4 => Mode::CutAfter(byte % 500),
        5 => Mode::CutRequestAfter(byte),
        6 => Mode::DropResponses,
        7 => Mode::Swallow,
        8 => Mode::HalfClose,
        9 => Mode::Delay(Duration::from_millis(rng.below(600))),
        _ => Mode::Throttle(1000 + byte * 10),
    }
}

/// Injects faults until the flag is set, and ends all faults before it returns.
type FaultInjector<'a> = Box<dyn FnOnce(&AtomicBool) + Send + 'a>;

/// Agents append and the daemon streams to `faulty` for this time, while `injectors` inject faults.
/// Copies are fetched from `direct` if there is one, and then always succeed.
fn run_with_faults(
    faulty: &Backend,
    direct: Option<&Backend>,
    seed: u64,
    long: Duration,
    injectors: Vec<FaultInjector<'_>>,
) -> (Load, Running) {
    let mut rng = TestRng::new(seed);
    let mut load = Load::new(TempHome::new());
    let mut daemon = faulty.daemon(&load.home, &TIMEOUT);
    let transcripts: Vec<PathBuf> = (0..AGENTS)
        .map(|agent| transcript(&load.home, &session(agent)))
        .collect();
    let start = |agent: u64, rng: &mut TestRng| {
        start_agent(
            &transcripts[usize::try_from(agent).unwrap()..][..1],
            rng.below(u64::MAX),
        )
    };
    let mut agents: Vec<Running> = (0..AGENTS).map(|agent| start(agent, &mut rng)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = Stop(&over);
        for injector in injectors {
            let over = &over;
            scope.spawn(move || injector(over));
        }
        let began = Instant::now();
        // On a slow machine longer, until enough was acknowledged during the faults.
        while began.elapsed() < long || (load.flushes.0 < 3 && began.elapsed() < 3 * long) {
            // They may be late, but not wrong.
            load.flush(faulty, "700ms").ok();
            let one = session(rng.below(AGENTS));
            load.flush_session(faulty, &one, "2s").ok();
            let fetched = load.check_copy(direct.unwrap_or(faulty), &one);
            assert!(fetched || direct.is_none(), "{one} cannot be fetched");
            if rng.below(3) == 0 {
                daemon.kill();
                daemon = faulty.daemon(&load.home, &TIMEOUT);
                load.kills += 1;
            }
            if rng.below(3) == 0 {
                let number = rng.below(AGENTS);
                let agent = &mut agents[usize::try_from(number).unwrap()];
                agent.kill();
                *agent = start(number, &mut rng);
                load.kills += 1;
            }
        }
        drop(stop);
    });
    drop(agents);
    (load, daemon)
}

/// Stops the fault injectors, also after a failed check.
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
    let faulty = Backend::on(&format!("http://{}", proxies[0].addr()), &bucket, &behind);
    let changes = AtomicU32::new(0);
    let injectors = proxies
        .iter()
        .zip(1..)
        .map(|(proxy, number)| -> FaultInjector<'_> {
            let changes = &changes;
            Box::new(move |over| {
                let mut rng = TestRng::new(seed + number);
                while !over.load(SeqCst) {
                    proxy.set(fault(&mut rng));
                    changes.fetch_add(1, SeqCst);
                    std::thread::sleep(Duration::from_millis(100 + rng.below(500)));
                }
                proxy.set(Mode::Pass);
            })
        });
    let (mut load, _daemon) = run_with_faults(
        &faulty,
        Some(&direct),
        seed,
        Duration::from_secs(20),
        injectors.collect(),
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
    let injector = |number: usize,
                    kill: Box<dyn Fn() + Send>,
                    start: Box<dyn Fn() + Send>|
     -> FaultInjector<'_> {
        let kills = &kills[number];
        Box::new(move |over| {
            let mut rng = TestRng::new(seed + 1 + number as u64);
            // At least three, also on a slow machine; the agents keep writing until then.
            while !over.load(SeqCst) || kills.load(SeqCst) < 3 {
                std::thread::sleep(Duration::from_millis(rng.below(2500)));
                kill();
                kills.fetch_add(1, SeqCst);
                std::thread::sleep(Duration::from_millis(rng.below(500)));
                start();
            }
        })
    };
    let injectors = vec![
        injector(0, Box::new(|| s3.stop()), Box::new(|| s3.start())),
        injector(
            1,
            Box::new(|| postgres.kill()),
            Box::new(|| postgres.start()),
        ),
    ];
    let (mut load, _daemon) =
        run_with_faults(&backend, None, seed, Duration::from_secs(20), injectors);
    load.check_all(&backend);
    load.check_reindex(&backend);
    let kills = kills.map(AtomicU32::into_inner);
    load.summarize(&format!("servers killed {kills:?} times"));
}
