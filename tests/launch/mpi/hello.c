/* An MPI program that knows nothing of Paceline: every rank says where it is, and rank 0 checks the sum.

       mpicc hello.c -o hello
       paceline launch --on mpi --nproc 4 --env-style mpi -- ./hello
 */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size, sum = 0, length;
    char host[MPI_MAX_PROCESSOR_NAME];

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &length);
    printf("rank %d of %d on %s\n", rank, size, host);
    MPI_Reduce(&rank, &sum, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("the sum of all ranks is %d\n", sum);
    MPI_Finalize();
    return rank == 0 && sum != size * (size - 1) / 2;
}
