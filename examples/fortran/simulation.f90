! SPDX-License-Identifier: Apache-2.0
! Trains a model in a simulation: the first half of the ranks simulate, the others train a model of
! it that Python has written (docs/c.md). The same as examples/c/simulation.c.
!
!   mpirun -n 4 simulation train.pt2 FOLDER
module training
  use, intrinsic :: iso_c_binding
  use mpi
  use smp_c
  implicit none

  integer, parameter :: cells = 16, inputs = 3, outputs = 2, steps = 12, microbatches = 2

  ! The values to predict in the step under way, by cell.
  real(c_float), target :: targets(cells, outputs)

contains

  !> Three numbers of a cell in a step, and two that the model shall predict from them.
  subroutine simulate_cell(cell, step, x, y)
    integer, intent(in) :: cell, step
    real(c_float), intent(out) :: x(inputs), y(outputs)
    integer :: i
    do i = 1, inputs
      x(i) = real(mod(5 * (cell - 1) + 7 * step + 11 * (i - 1), 32) - 16, c_float) / 16
    end do
    y(1) = x(1) * x(2) - x(3)
    y(2) = x(1) + x(2) * x(3) / 2
  end subroutine

  !> The ranks of `simulators` share the cells, and the first of them sends them to all trainers.
  subroutine simulate(simulators, trainers)
    integer, intent(in) :: simulators, trainers
    real(c_float) :: mine(cells, inputs + outputs), all(cells, inputs + outputs)
    double precision :: energy, total
    integer :: rank, size, ierror, step, cell, i
    call MPI_Comm_rank(simulators, rank, ierror)
    call MPI_Comm_size(simulators, size, ierror)
    energy = 0
    do step = 0, steps - 1
      mine = 0
      do cell = rank + 1, cells, size
        call simulate_cell(cell, step, mine(cell, 1:inputs), mine(cell, inputs + 1:))
        energy = energy + dble(mine(cell, inputs + 1))**2
      end do
      call MPI_Reduce(mine, all, cells * (inputs + outputs), MPI_REAL, MPI_SUM, 0, simulators, ierror)
      if (rank /= 0) cycle
      do i = 0, trainers - 1
        call MPI_Send(all, cells * (inputs + outputs), MPI_REAL, size + i, step, MPI_COMM_WORLD, ierror)
      end do
    end do
    call MPI_Reduce(energy, total, 1, MPI_DOUBLE_PRECISION, MPI_SUM, 0, simulators, ierror)
    if (rank == 0) print '(a, i0, a, f0.6)', 'simulated ', steps, ' steps, energy ', total
  end subroutine

  !> Ends the program with the library's text for a call that failed.
  subroutine check(code)
    integer(c_int), intent(in) :: code
    integer :: ierror
    if (code == smp_ok) return
    print '(a, i0, 2a)', 'error ', code, ': ', error_text()
    call MPI_Abort(MPI_COMM_WORLD, 1, ierror)
  end subroutine

  !> The gradient of half the squared error, in place of a loss: what an adjoint of the simulation
  !> would give. In C the arrays have the last index fastest: here they are (output, row).
  function gradient_of_error(context, microbatch, output, gradient, count) bind(c) result(code)
    type(c_ptr), value :: context
    integer(c_int64_t), value :: microbatch, count
    type(smp_tensor), intent(in) :: output(*), gradient(*)
    integer(c_int) :: code
    real(c_float), pointer :: given(:, :), asked(:, :)
    integer :: rows, first, i
    code = 1
    if (count /= 1 .or. c_associated(context)) return
    rows = int(output(1)%sizes(1))
    call c_f_pointer(output(1)%data, given, [outputs, rows])
    call c_f_pointer(gradient(1)%data, asked, [outputs, rows])
    first = int(microbatch) * rows
    do i = 1, rows
      asked(:, i) = (given(:, i) - targets(first + i, :)) / real(rows, c_float)
    end do
    code = 0
  end function

  subroutine train(trainers, program, folder)
    integer, intent(in) :: trainers
    character(*), intent(in) :: program, folder
    real(c_float) :: samples(cells, inputs + outputs)
    real(c_float), target :: x(cells, inputs)
    real(c_double) :: loss
    type(c_ptr) :: session
    character(100) :: config
    integer :: rank, size, ierror, step
    call MPI_Comm_rank(trainers, rank, ierror)
    call MPI_Comm_size(trainers, size, ierror)
    write (config, '(a, i0, a, i0, a)') '{"partitions": ', size, ', "microbatches": ', microbatches, '}'
    call check(smp_set_threads(1_c_int64_t))
    call check(smp_open_mpi(trim(config) // c_null_char, int(trainers, c_int64_t), session))
    call check(smp_load(session, trim(program) // c_null_char, c_null_ptr))
    call check(smp_optimizer(session, 'adamw' // c_null_char, '{"lr": 0.01}' // c_null_char))
    do step = 0, steps - 1
      call MPI_Recv(samples, cells * (inputs + outputs), MPI_REAL, 0, step, MPI_COMM_WORLD, &
                    MPI_STATUS_IGNORE, ierror)
      x = samples(:, :inputs)
      targets = samples(:, inputs + 1:)
      if (mod(step, 2) == 0) then
        call check(smp_train(session, [tensor_of(x)], 1_c_int64_t, 'mse' // c_null_char, &
                             tensor_of(targets), loss))
      else
        call check(smp_train_by_gradient(session, [tensor_of(x)], 1_c_int64_t, &
                                         c_funloc(gradient_of_error), c_null_ptr))
      end if
    end do
    call check(smp_save_weights(session, trim(folder) // c_null_char, 'trained' // c_null_char))
    call check(smp_close(session))
    if (rank == 0) print '(a, i0, a, f0.6)', 'trained on ', size, ' ranks, last loss ', loss
  end subroutine
end module

program simulation
  use mpi
  use training
  implicit none
  character(4096) :: program_file, folder
  integer :: level, rank, size, half, ierror
  logical :: is_trainer
  call MPI_Init_thread(MPI_THREAD_FUNNELED, level, ierror)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierror)
  call MPI_Comm_size(MPI_COMM_WORLD, size, ierror)
  if (command_argument_count() /= 2 .or. size < 2 .or. mod(size, 2) /= 0) then
    if (rank == 0) print '(a)', 'usage: mpirun -n 4 simulation train.pt2 FOLDER'
    call MPI_Finalize(ierror)
    stop 2
  end if
  call get_command_argument(1, program_file)
  call get_command_argument(2, folder)
  is_trainer = rank >= size / 2
  call MPI_Comm_split(MPI_COMM_WORLD, merge(1, 0, is_trainer), rank, half, ierror)
  if (is_trainer) then
    call train(half, program_file, folder)
  else
    call simulate(half, size / 2)
  end if
  call MPI_Comm_free(half, ierror)
  call MPI_Finalize(ierror)
end program
