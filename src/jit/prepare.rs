//! Kernels for all ranks before any of them enters a step: found, or compiled once and sent to whoever lacks them.
//!
//! Who compiles what follows from what every rank says that it has; each round of compilation ends in an agreement, so that
//! ranks which wait know whom for and what it compiles.

mod error;
mod plan;
mod ticker;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::cache::{Artefact, Cache};
use super::key::KeyParts;
use super::nvrtc::{Compiler, CompilerId, NvrtcError};
use super::request::KernelRequest;
use crate::fault::{Action, Injected, Stage};
use crate::ids::Rank;
use crate::select::RankSet;
use crate::select::fingerprint::SessionBuilder;
use crate::world::{Compared, Group, Parts, Phase, Sheet, World};
pub use error::JitError;
use plan::Plan;

/// How kernels are come by.
#[derive(Debug, Clone, Copy)]
pub struct PrepareSettings<'a> {
    /// Where NVRTC lies: the value of `LOCKSTEP_NVRTC`.
    pub nvrtc: Option<&'a str>,
    /// Fail rather than compile.
    pub require_warm: bool,
    /// Kernels that this rank may compile at once: its threads.
    pub num_threads: usize,
    /// The longest that ranks wait for each other's compilers.
    pub limit: Duration,
}

/// The kernels of a session, alike on all ranks.
#[derive(Debug)]
pub struct Prepared {
    /// In the order of the requests, without doubles.
    pub kernels: Vec<(KernelRequest, Artefact)>,
    /// Kernels that this rank compiled.
    pub num_compiled: usize,
    /// Kernels that came from another rank.
    pub num_received: usize,
    /// From the first look to the last kernel.
    pub elapsed: Duration,
}

impl Prepared {
    /// The artefact of a request.
    #[must_use]
    pub fn artefact(&self, request: &KernelRequest) -> Option<&Artefact> {
        self.kernels.iter().find(|(known, _)| known == request).map(|(_, artefact)| artefact)
    }

    /// Puts every key into what all ranks compare (hazard 7): an artefact made of other sources, flags or constants, or by
    /// another compiler, has another one.
    pub fn add_to(&self, fields: &mut SessionBuilder) {
        for (request, artefact) in &self.kernels {
            fields.artefact(&request.describe(), &artefact.key().to_string());
        }
    }
}

/// Gets every kernel of `requests`, which are the same on all ranks; collective.
///
/// # Errors
/// The same on all ranks: if compilers or requests differ, or something has to be compiled and can't or mustn't be.
pub fn prepare(
    world: &World,
    cache: &mut Cache,
    requests: &[KernelRequest],
    settings: &PrepareSettings<'_>,
) -> Result<Prepared, JitError> {
    let started = Instant::now();
    world.enter(Phase { name: "compile", limit: settings.limit, key: "timeouts.compile_s" });
    let requests = wanted(world, requests);
    let compiler = Compiler::load(settings.nvrtc);
    let id = agree_on_compiler(world, cache, &requests, &compiler)?;
    let parts: Vec<KeyParts> = requests.iter().map(|request| KeyParts::new(request, &id)).collect();
    compare_keys(world, &parts)?;
    let mut found: Vec<Option<Artefact>> = parts.iter().map(|parts| cache.find(&parts.name, parts.key())).collect();
    let plan = Plan::new(&who_has(world, &found), &how_many_at_once(world, &compiler, settings.num_threads));
    say_notes(world, cache);
    let missing: Vec<&KernelRequest> = plan.compiled().map(|idx| &requests[idx]).collect();
    if !missing.is_empty() && settings.require_warm {
        return Err(world.refuse(JitError::cold(&missing, cache)).into());
    }
    let mut job = Job { world, compiler: compiler.ok(), requests: &requests, parts: &parts, plan: &plan };
    let (mut num_compiled, mut num_received) = (0, 0);
    for round in 0..plan.num_rounds() {
        let made = job.compile(cache, round)?;
        num_compiled += made.len();
        keep(cache, &mut found, made);
    }
    let received = job.exchange(&found)?;
    num_received += received.len();
    keep(cache, &mut found, received);
    say_notes(world, cache);
    let kernels = requests.into_iter().zip(found.into_iter().flatten()).collect();
    Ok(Prepared { kernels, num_compiled, num_received, elapsed: started.elapsed() })
}

fn keep(cache: &mut Cache, found: &mut [Option<Artefact>], made: Vec<(usize, Artefact)>) {
    for (idx, artefact) in made {
        cache.publish(&artefact);
        found[idx] = Some(artefact);
    }
}

/// The requests without doubles. A fault makes this rank's others than its peers'.
fn wanted(world: &World, requests: &[KernelRequest]) -> Vec<KernelRequest> {
    let mut wanted: Vec<KernelRequest> = Vec::new();
    for request in requests {
        if !wanted.contains(request) {
            wanted.push(request.clone());
        }
    }
    if world.has_fault(Stage::Compile, &Action::Stale) {
        wanted = wanted.into_iter().map(|request| request.with("STALE", true)).collect();
    }
    wanted
}

/// The build that all keys are made with: the one that every rank with a compiler has. Where no rank has one, the newest of
/// those that made what the caches hold.
fn agree_on_compiler(
    world: &World,
    cache: &Cache,
    requests: &[KernelRequest],
    compiler: &Result<Compiler, NvrtcError>,
) -> Result<CompilerId, JitError> {
    let mine = compiler.as_ref().map_or_else(|_| String::new(), |compiler| compiler.id().to_string());
    let all: Vec<String> = gather_texts(world, &mine);
    let mut present: Vec<&String> = all.iter().filter(|id| !id.is_empty()).collect();
    present.sort();
    present.dedup();
    match present.as_slice() {
        [id] => return Ok(CompilerId::from_text(id)),
        [] => {}
        _ => return Err(world.refuse(JitError::compilers(&all)).into()),
    }
    let nobody = CompilerId::from_text("");
    let known_here: Vec<Vec<String>> =
        requests.iter().map(|request| cache.compilers(&KeyParts::new(request, &nobody))).collect();
    let known = gather_texts(world, &known_here.iter().map(|ids| ids.join("\t")).collect::<Vec<_>>().join("\n"));
    match plan::newest_for_all(&known, requests.len()) {
        Some(id) => Ok(CompilerId::from_text(&id)),
        None => {
            let cause = compiler.as_ref().err().cloned();
            Err(world.refuse(JitError::no_compiler(requests, cache, cause)).into())
        }
    }
}

fn gather_texts(world: &World, mine: &str) -> Vec<String> {
    let all = world.all_gather_bytes(mine.as_bytes());
    all.into_iter().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect()
}

/// Every rank is about to use the same kernels, or none is: compared before one is sent.
fn compare_keys(world: &World, parts: &[KeyParts]) -> Result<(), JitError> {
    let encoded = serde_json::to_vec(parts).unwrap_or_default();
    let sheet = Sheet { digest: *blake3::hash(&encoded).as_bytes(), encoded };
    match world.compare::<JitError>(Ok(sheet))? {
        Compared::Alike => Ok(()),
        Compared::Differing(all) => Err(world.refuse(JitError::keys(&all)).into()),
    }
}

/// `[rank][kernel]`: which kernels each rank has.
fn who_has(world: &World, found: &[Option<Artefact>]) -> Vec<Vec<bool>> {
    let mine: Vec<u8> = found.iter().map(|artefact| u8::from(artefact.is_some())).collect();
    world.all_gather_bytes(&mine).into_iter().map(|rank| rank.into_iter().map(|byte| byte == 1).collect()).collect()
}

/// `[rank]`: kernels that it can compile at once.
fn how_many_at_once(world: &World, compiler: &Result<Compiler, NvrtcError>, num_threads: usize) -> Vec<usize> {
    let mine = if compiler.is_ok() { num_threads.max(1) } else { 0 };
    world.all_gather_u64([mine as u64]).into_iter().map(|[n]| usize::try_from(n).unwrap_or(1)).collect()
}

/// Says what ranks noted, each thing once.
fn say_notes(world: &World, cache: &mut Cache) {
    let notes = cache.take_notes().join("\n");
    let mut said: Vec<(String, Vec<Rank>)> = Vec::new();
    for (rank, notes) in gather_texts(world, &notes).iter().enumerate() {
        for note in notes.lines() {
            let rank = Rank::from_index(rank);
            match said.iter_mut().find(|(known, _)| known == note) {
                Some((_, ranks)) => ranks.push(rank),
                None => said.push((note.to_owned(), vec![rank])),
            }
        }
    }
    for (note, ranks) in said.into_iter().filter(|_| world.is_root()) {
        if ranks.len() == world.size() {
            tracing::warn!("{note}");
        } else {
            tracing::warn!("{note} (on {})", ranks.into_iter().collect::<RankSet>());
        }
    }
}

/// What is being done.
struct Job<'a> {
    world: &'a World,
    compiler: Option<Compiler>,
    requests: &'a [KernelRequest],
    parts: &'a [KeyParts],
    plan: &'a Plan,
}

impl Job<'_> {
    /// Compiles this rank's kernels of a round, each on a thread of its own; collective.
    fn compile(&mut self, cache: &Cache, round: usize) -> Result<Vec<(usize, Artefact)>, JitError> {
        let work = self.plan.round(round);
        let described = |idx: usize| format!("compiling {}", self.requests[idx].describe());
        self.world.expect_work(work.iter().map(|&(rank, idx)| (rank, described(idx))).collect());
        let mine: Vec<usize> =
            work.iter().filter(|(rank, _)| *rank == self.world.rank()).map(|&(_, idx)| idx).collect();
        let made = self.world.agree(self.compile_all(cache, &mine));
        self.world.expect_work(Vec::new());
        Ok(made?)
    }

    fn compile_all(&self, cache: &Cache, mine: &[usize]) -> Result<Vec<(usize, Artefact)>, JitError> {
        let Some((&first, others)) = mine.split_first() else { return Ok(Vec::new()) };
        let Some(compiler) = &self.compiler else {
            return Err(JitError::no_compiler(std::slice::from_ref(&self.requests[first]), cache, None));
        };
        let (requests, parts) = (self.requests, self.parts);
        thread::scope(|scope| {
            let start = |&idx: &usize| {
                let compile = move || compile_one(compiler, cache, (&requests[idx], &parts[idx]), || Ok(()));
                (idx, scope.spawn(compile))
            };
            let others: Vec<_> = others.iter().map(start).collect();
            // On this thread, which alone knows MPI, and where a fault of this rank strikes.
            let strike = || self.world.fault(Stage::Compile);
            let mut made = vec![(first, compile_one(compiler, cache, (&requests[first], &parts[first]), strike))];
            let ended = |(idx, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
                // A panic has ended the process before it could be joined.
                (idx, thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            };
            made.extend(others.into_iter().map(ended));
            made.into_iter().map(|(idx, artefact)| artefact.map(|artefact| (idx, artefact))).collect()
        })
    }

    /// Sends what this rank is to send, and takes what it lacks; collective.
    fn exchange(&self, found: &[Option<Artefact>]) -> Result<Vec<(usize, Artefact)>, JitError> {
        let (world, me) = (self.world, self.world.rank());
        let mut runs: Vec<Vec<u8>> = vec![Vec::new(); world.size()];
        for (idx, source) in self.plan.sources() {
            let Some(artefact) = found[idx].as_ref().filter(|_| source.rank() == me) else { continue };
            let encoded = artefact.encode();
            source.lacking().iter().for_each(|rank| runs[rank.0 as usize].extend(&encoded));
        }
        let counts: Vec<usize> = runs.iter().map(Vec::len).collect();
        let to: Vec<u64> = counts.iter().map(|&count| count as u64).collect();
        let as_usize = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let from: Vec<usize> = world.all_to_all_u64(&to).into_iter().map(as_usize).collect();
        let longest = to.iter().copied().max().unwrap_or_default();
        let longest = world.all_gather_u64([longest]).into_iter().map(|[n]| as_usize(n)).max().unwrap_or_default();
        let bytes = runs.concat();
        let received = world.all_to_all_bytes(Parts { bytes: &bytes, counts: &counts }, &from, longest);
        world.agree(self.take(&received, &from)).map_err(JitError::from)
    }

    /// Takes apart what came: runs in the order of ranks, each in the order of kernels.
    fn take(&self, received: &[u8], from: &[usize]) -> Result<Vec<(usize, Artefact)>, JitError> {
        let mut rest = received;
        let mut taken = Vec::new();
        for (rank, &count) in from.iter().enumerate() {
            let (mut run, others) = rest.split_at(count);
            rest = others;
            let sender = Rank::from_index(rank);
            for (idx, source) in self.plan.sources() {
                if source.rank() == sender && source.lacking().contains(&self.world.rank()) {
                    let artefact = Artefact::decode(&mut run, self.parts[idx].key());
                    let artefact =
                        artefact.map_err(|source| JitError::received(sender, &self.requests[idx], source))?;
                    taken.push((idx, artefact));
                }
            }
        }
        Ok(taken)
    }
}

/// Compiles one kernel, after `before`, and says so.
fn compile_one(
    compiler: &Compiler,
    cache: &Cache,
    (request, parts): (&KernelRequest, &KeyParts),
    before: impl FnOnce() -> Result<(), Injected>,
) -> Result<Artefact, JitError> {
    let changes = cache.changes(parts);
    let what = request.describe();
    let why = if changes.is_empty() { "none is cached".to_owned() } else { changes.join(", ") };
    let started = Instant::now();
    let compiled = ticker::during(&what, || {
        before()?;
        compiler.compile(request).map_err(JitError::from)
    })?;
    // Counted by those who want to know how often a kernel was built.
    tracing::info!(key = %parts.key(), "compiled {what} in {:.1} s: {why}", started.elapsed().as_secs_f64());
    Ok(Artefact::new(request, parts.clone(), compiled))
}

/// Where kernels are kept unless the deployment says: below the user's cache directory.
#[must_use]
pub fn default_dir(xdg_cache_home: Option<&str>, home: Option<&str>) -> Option<String> {
    let of_user = xdg_cache_home.map(str::to_owned).or_else(|| home.map(|home| format!("{home}/.cache")));
    of_user.map(|dir| Path::new(&dir).join("lockstep").display().to_string())
}

#[cfg(test)]
mod tests;
