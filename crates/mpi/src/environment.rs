//! Which process of which world this one is, as its launcher tells it: a pure function of the environment
//! and of the layout that was asked for. Wrong combinations are refused with one sentence.

use pagemill_engine::ParallelMode;

/// Who started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` of Open MPI (`OMPI_COMM_WORLD_*`).
    Mpirun,
    /// `srun` (`SLURM_PROCID`, `SLURM_STEP_*`).
    Srun,
    /// A launcher that speaks PMI (`PMI_RANK`, `PMI_SIZE`).
    Pmi,
}

impl Launcher {
    fn name(self) -> &'static str {
        match self {
            Self::Mpirun => "mpirun",
            Self::Srun => "srun",
            Self::Pmi => "the launcher",
        }
    }
}

/// This process among those of its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Who started it.
    pub launcher: Launcher,
    /// Its rank, `0..size`: stage by stage.
    pub rank: usize,
    /// Processes in all: one for each rank of the layout.
    pub size: usize,
    /// Its place among the processes of its host.
    pub local_rank: usize,
    /// Processes on its host, as far as the launcher tells; else all.
    pub local_size: usize,
    /// Whether the launcher said which cores it may use.
    pub is_bound: bool,
}

/// An environment that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum EnvironmentError {
    /// A variable without the one that belongs to it.
    #[error("{present} is set, but {missing} is not: a process started by {launcher} has both")]
    Incomplete { present: &'static str, missing: &'static str, launcher: &'static str },
    /// A variable that is no number in its range.
    #[error("{variable} = {value}: must be a number from {min} to {max}")]
    Value { variable: &'static str, value: String, min: usize, max: usize },
    /// Another number of processes than ranks.
    #[error(
        "{launcher} started {processes} processes, but --tensor-parallel {} and --pipeline-parallel {} make {} ranks: \
         one process for each rank is needed",
        .mode.tensor_parallel, .mode.pipeline_parallel, .mode.num_ranks()
    )]
    Ranks { launcher: &'static str, processes: usize, mode: ParallelMode },
    /// srun without a way for the processes to find each other.
    #[error("srun started {processes} processes without PMI: add --mpi=pmix (or --mpi=pmi2)")]
    NoPmi { processes: usize },
    /// A pod of a LeaderWorkerSet whose container calls pagemill without mpirun.
    #[error(
        "LWS_GROUP_SIZE = {group_size}, but no mpirun started this process: run mpirun on the leader, and sshd on the \
         workers (docs/deploy.md)"
    )]
    LeaderWorkerSet { group_size: usize },
    /// A group with pods that would have nothing to do.
    #[error(
        "mpirun started {processes} processes for a LeaderWorkerSet of {group_size} pods: each pod needs at least one"
    )]
    IdlePods { processes: usize, group_size: usize },
    /// mpirun was started on a worker.
    #[error("mpirun was started on pod {worker_index} of the LeaderWorkerSet: start it on the leader, pod 0")]
    NotLeader { worker_index: usize },
}

/// More processes than any world has.
const MAX_PROCESSES: usize = 1 << 16;

/// Processes that a launcher started together with this one, itself included: 1 without a launcher.
///
/// # Errors
/// As [`World::from_environment`].
pub fn num_processes(variable: &dyn Fn(&str) -> Option<String>) -> Result<usize, EnvironmentError> {
    Ok(Environment(variable).launched()?.map_or(1, |world| world.size))
}

impl World {
    /// Reads the launcher's variables. `None`: this process stands alone, and its ranks are threads.
    ///
    /// # Errors
    /// One sentence naming the variable, or the two numbers that do not fit together.
    pub fn from_environment(
        variable: &dyn Fn(&str) -> Option<String>,
        mode: ParallelMode,
    ) -> Result<Option<Self>, EnvironmentError> {
        let environment = Environment(variable);
        let world = environment.launched()?;
        environment.check_leader_worker_set(world)?;
        let Some(world) = world.filter(|world| world.size > 1) else { return Ok(None) };
        if world.size != mode.num_ranks() {
            return Err(EnvironmentError::Ranks { launcher: world.launcher.name(), processes: world.size, mode });
        }
        Ok(Some(world))
    }
}

impl World {
    /// Processes that share this one's cores, itself included, where it may use `usable_cores` of the host's
    /// `online_cores`: all of the host unless the launcher bound them to parts of it (a core, a socket).
    #[must_use]
    pub fn sharing(&self, usable_cores: usize, online_cores: usize) -> usize {
        if !self.is_bound || usable_cores >= online_cores {
            return self.local_size;
        }
        (usable_cores * self.local_size).div_ceil(online_cores).clamp(1, self.local_size)
    }
}

/// The variables.
struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// A variable's text; empty is as good as not set.
    fn text(&self, variable: &'static str) -> Option<String> {
        (self.0)(variable).filter(|value| !value.is_empty())
    }

    fn number(&self, variable: &'static str, min: usize, max: usize) -> Result<Option<usize>, EnvironmentError> {
        let Some(value) = self.text(variable) else { return Ok(None) };
        match value.parse() {
            Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(EnvironmentError::Value { variable, value, min, max }),
        }
    }

    /// Rank and size, both or neither.
    fn place(
        &self,
        rank: &'static str,
        size: &'static str,
        launcher: Launcher,
    ) -> Result<Option<(usize, usize)>, EnvironmentError> {
        let launcher = launcher.name();
        match (self.text(rank), self.number(size, 1, MAX_PROCESSES)?) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(EnvironmentError::Incomplete { present: rank, missing: size, launcher }),
            (None, Some(_)) => Err(EnvironmentError::Incomplete { present: size, missing: rank, launcher }),
            (Some(_), Some(processes)) => Ok(self.number(rank, 0, processes - 1)?.map(|rank| (rank, processes))),
        }
    }

    /// What the launcher told, whoever it was.
    fn launched(&self) -> Result<Option<World>, EnvironmentError> {
        Ok(match self.mpirun()? {
            Some(world) => Some(world),
            None => match self.srun()? {
                Some(world) => Some(world),
                None => self.pmi()?,
            },
        })
    }

    fn mpirun(&self) -> Result<Option<World>, EnvironmentError> {
        let launcher = Launcher::Mpirun;
        let Some((rank, size)) = self.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", launcher)? else {
            return Ok(None);
        };
        let local_size = self.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, size)?.unwrap_or(size);
        let local_rank = self.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, local_size - 1)?;
        let is_bound = self.text("OMPI_MCA_orte_bound_at_launch").is_some_and(|value| value != "0");
        let local_rank = local_rank.unwrap_or(rank % local_size);
        Ok(Some(World { launcher, rank, size, local_rank, local_size, is_bound }))
    }

    /// `SLURM_PROCID` alone is no sign: a batch script has it too.
    fn srun(&self) -> Result<Option<World>, EnvironmentError> {
        let launcher = Launcher::Srun;
        let Some(size) = self.number("SLURM_STEP_NUM_TASKS", 1, MAX_PROCESSES)? else { return Ok(None) };
        let Some(rank) = self.number("SLURM_PROCID", 0, size - 1)? else {
            let (present, missing) = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID");
            return Err(EnvironmentError::Incomplete { present, missing, launcher: launcher.name() });
        };
        let has_pmi = self.text("PMIX_RANK").is_some() || self.text("PMI_RANK").is_some();
        if size > 1 && !has_pmi {
            return Err(EnvironmentError::NoPmi { processes: size });
        }
        let node = self.number("SLURM_NODEID", 0, MAX_PROCESSES)?.unwrap_or(0);
        let told = self.text("SLURM_STEP_TASKS_PER_NODE").and_then(|text| tasks_on_node(&text, node));
        let local_size = told.unwrap_or(size).clamp(1, size);
        let local_rank = self.number("SLURM_LOCALID", 0, local_size - 1)?.unwrap_or(rank % local_size);
        let is_bound = self.text("SLURM_CPU_BIND_TYPE").is_some_and(|kind| !kind.starts_with("none"));
        Ok(Some(World { launcher, rank, size, local_rank, local_size, is_bound }))
    }

    fn pmi(&self) -> Result<Option<World>, EnvironmentError> {
        let launcher = Launcher::Pmi;
        let Some((rank, size)) = self.place("PMI_RANK", "PMI_SIZE", launcher)? else { return Ok(None) };
        let local_size = self.number("MPI_LOCALNRANKS", 1, size)?.unwrap_or(size);
        let local_rank = self.number("MPI_LOCALRANKID", 0, local_size - 1)?.unwrap_or(rank % local_size);
        Ok(Some(World { launcher, rank, size, local_rank, local_size, is_bound: false }))
    }

    /// In a LeaderWorkerSet the leader runs mpirun, which reaches every pod.
    fn check_leader_worker_set(&self, world: Option<World>) -> Result<(), EnvironmentError> {
        let Some(group_size) = self.number("LWS_GROUP_SIZE", 1, MAX_PROCESSES)? else { return Ok(()) };
        let worker_index = self.number("LWS_WORKER_INDEX", 0, group_size - 1)?.unwrap_or(0);
        let processes = world.map_or(1, |world| world.size);
        match world {
            _ if group_size == 1 => Ok(()),
            None => Err(EnvironmentError::LeaderWorkerSet { group_size }),
            Some(_) if processes < group_size => Err(EnvironmentError::IdlePods { processes, group_size }),
            Some(world) if world.rank == 0 && worker_index != 0 => Err(EnvironmentError::NotLeader { worker_index }),
            Some(_) => Ok(()),
        }
    }
}

/// `2(x3),1`: two tasks on each of the first three nodes, one on the fourth.
fn tasks_on_node(text: &str, node: usize) -> Option<usize> {
    let mut first = 0usize;
    for part in text.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1usize),
        };
        first = first.checked_add(nodes)?;
        if node < first {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TWO_BY_TWO: ParallelMode = ParallelMode { tensor_parallel: 2, pipeline_parallel: 2 };

    fn read(variables: &[(&str, &str)], mode: ParallelMode) -> Result<Option<World>, EnvironmentError> {
        let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        World::from_environment(&get, mode)
    }

    fn refusal(variables: &[(&str, &str)], mode: ParallelMode) -> String {
        read(variables, mode).unwrap_err().to_string()
    }

    #[test]
    fn without_a_launcher_ranks_are_threads() {
        assert_eq!(read(&[], TWO_BY_TWO), Ok(None));
        // A batch script's own process.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")], TWO_BY_TWO), Ok(None));
        let one = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        assert_eq!(read(&one, TWO_BY_TWO), Ok(None));
        assert_eq!(read(&[("OMPI_COMM_WORLD_RANK", ""), ("LWS_GROUP_SIZE", "1")], TWO_BY_TWO), Ok(None));
    }

    #[test]
    fn mpirun_is_understood() {
        let variables = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("OMPI_MCA_orte_bound_at_launch", "1"),
        ];
        let world =
            World { launcher: Launcher::Mpirun, rank: 3, size: 4, local_rank: 1, local_size: 2, is_bound: true };
        assert_eq!(read(&variables, TWO_BY_TWO), Ok(Some(world)));
        let least = World { local_rank: 3, local_size: 4, is_bound: false, ..world };
        assert_eq!(read(&variables[..2], TWO_BY_TWO), Ok(Some(least)));
    }

    #[test]
    fn processes_are_counted() {
        let count = |variables: &[(&str, &str)]| {
            let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            num_processes(&get)
        };
        assert_eq!(count(&[]), Ok(1));
        assert_eq!(count(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]), Ok(1));
        assert_eq!(count(&[("PMI_RANK", "1"), ("PMI_SIZE", "3")]), Ok(3));
        assert!(count(&[("PMI_RANK", "1")]).is_err());
    }

    #[test]
    fn cores_are_shared_by_those_bound_to_them() {
        let bound =
            World { launcher: Launcher::Mpirun, rank: 0, size: 4, local_rank: 0, local_size: 4, is_bound: true };
        // One core each; two sockets of which each has two processes; the whole machine.
        assert_eq!([bound.sharing(1, 16), bound.sharing(8, 16), bound.sharing(16, 16)], [1, 2, 4]);
        // A container's four cores of sixteen, bound by nobody.
        assert_eq!(World { is_bound: false, ..bound }.sharing(4, 16), 4);
    }

    #[test]
    fn srun_and_pmi_are_understood() {
        let srun = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
            ("PMIX_RANK", "5"),
            ("SLURM_CPU_BIND_TYPE", "mask_cpu:"),
        ];
        let mode = ParallelMode { tensor_parallel: 1, pipeline_parallel: 7 };
        let world = World { launcher: Launcher::Srun, rank: 5, size: 7, local_rank: 1, local_size: 2, is_bound: true };
        assert_eq!(read(&srun, mode), Ok(Some(world)));
        assert_eq!(tasks_on_node("2(x3),1", 3), Some(1));
        for broken in ["2(x3),1", "", "2(x", "x"] {
            assert_eq!(tasks_on_node(broken, 9), None);
        }
        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "1")];
        let world = World { launcher: Launcher::Pmi, rank: 1, size: 4, local_rank: 1, local_size: 2, is_bound: false };
        assert_eq!(read(&pmi, TWO_BY_TWO), Ok(Some(world)));
    }

    #[test]
    fn wrong_combinations_are_one_sentence() {
        let rank = ("OMPI_COMM_WORLD_RANK", "1");
        let size = ("OMPI_COMM_WORLD_SIZE", "4");
        let cases: [(&[(&str, &str)], &str); 12] = [
            (&[rank], "OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not"),
            (&[size], "OMPI_COMM_WORLD_SIZE is set, but OMPI_COMM_WORLD_RANK is not"),
            (&[("OMPI_COMM_WORLD_RANK", "4"), size], "OMPI_COMM_WORLD_RANK = 4: must be a number from 0 to 3"),
            (&[rank, ("OMPI_COMM_WORLD_SIZE", "many")], "OMPI_COMM_WORLD_SIZE = many: must be a number from 1"),
            (&[rank, ("OMPI_COMM_WORLD_SIZE", "3")], "mpirun started 3 processes, but --tensor-parallel 2"),
            (&[rank, size, ("OMPI_COMM_WORLD_LOCAL_RANK", "4")], "OMPI_COMM_WORLD_LOCAL_RANK = 4"),
            (&[("SLURM_STEP_NUM_TASKS", "4")], "SLURM_STEP_NUM_TASKS is set, but SLURM_PROCID is not"),
            (&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "0")], "srun started 4 processes without PMI"),
            (&[("PMI_RANK", "0")], "PMI_RANK is set, but PMI_SIZE is not"),
            (&[("LWS_GROUP_SIZE", "4"), ("LWS_WORKER_INDEX", "2")], "run mpirun on the leader"),
            (&[rank, size, ("LWS_GROUP_SIZE", "8")], "4 processes for a LeaderWorkerSet of 8 pods"),
            (
                &[("OMPI_COMM_WORLD_RANK", "0"), size, ("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1")],
                "mpirun was started on pod 1",
            ),
        ];
        for (variables, part) in cases {
            let sentence = refusal(variables, TWO_BY_TWO);
            assert!(sentence.contains(part) && !sentence.contains('\n'), "{sentence}");
        }
        let solo = refusal(&[rank, size], ParallelMode::SOLO);
        assert!(solo.contains("4 processes") && solo.contains("make 1 ranks"), "{solo}");
        // Both of them in a pod of a group that mpirun spans.
        let spanned = [rank, size, ("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1")];
        assert!(read(&spanned, TWO_BY_TWO).unwrap().is_some());
    }
}
